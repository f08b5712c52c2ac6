"""What a plugin is told: one environment variable, `QUANTKIT_KV_GUARD`, a mode or the path of a JSON file.

An engine hands its plugins no options, and all its processes have is their environment. ``off``, and a variable that is
not set, mean that no hook is registered; one that is blank is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from quantkit.errors import first_line
from quantkit.kv_guard.identity import PoolIdentity
from quantkit.kv_guard.settings import GuardSettings, PoolSize
from quantkit.kv_guard.tracker import KvGuardError, Mode

VARIABLE = "QUANTKIT_KV_GUARD"
_SECRET_CHARACTERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    """Keys of the JSON file, all but ``mode`` with a default.

    ``incidents``, ``metrics`` and ``dump`` are files that are written (JSON lines, Prometheus text, the pool at its
    first violation), under the names that `path_of` makes of them. ``model`` is the fingerprint that both sides of a
    transfer must share; None takes that of the model's config. ``secret`` they share, too: what owners are keyed with.
    ``most_mib`` bounds what the guard's arrays may take.
    """

    mode: Mode
    incidents: Path | None = None
    metrics: Path | None = None
    dump: Path | None = None
    ring_lines: int = 256
    model: str | None = None
    secret: str | None = field(default=None, repr=False)
    most_mib: int = 1024

    @property
    def secret_bytes(self) -> bytes | None:
        """None is a secret of each pool's own."""
        return None if self.secret is None else self.secret.encode()

    def of_tracker(self, identity: PoolIdentity, size: PoolSize, rank: int, group: int = 0) -> GuardSettings:
        """Of one group of layers in one process of the server, whose files it alone writes."""
        return GuardSettings(
            identity=identity,
            size=size,
            mode=self.mode,
            ring_lines=self.ring_lines,
            incidents=path_of(self.incidents, rank, group),
            secret=self.secret_bytes,
        )


def read_settings(environment: Mapping[str, str]) -> PluginSettings:
    """Of `QUANTKIT_KV_GUARD`. Raises KvGuardError for what it cannot mean, and for a blank one: a typo, and a value
    that was lost on the way, must not leave a server unguarded."""
    text = environment.get(VARIABLE, Mode.OFF).strip()
    if not text:
        raise KvGuardError(
            f"{VARIABLE} is blank", remedy=f"set it to {_modes()}, or to the path of a .json file, or leave it out"
        )
    if text in set(Mode):
        return PluginSettings(mode=Mode(text))
    if not text.endswith(".json"):
        raise KvGuardError(f"{VARIABLE} is {text!r}", remedy=f"set it to {_modes()}, or to the path of a .json file")
    return _read(Path(text))


def path_of(path: Path | None, rank: int, group: int = 0) -> Path | None:
    """The file of one tracker: two processes that wrote to one would tear each other's lines.

    ``rank`` is one of all processes of the server, ``group`` one of the rank's groups of layers.
    """
    return None if path is None else path.with_name(f"{path.stem}.rank{rank}.group{group}{path.suffix}")


def check_memory(num_bytes: int, settings: PluginSettings, what: str) -> None:
    """Raises KvGuardError for arrays that take more than they may."""
    if num_bytes > settings.most_mib << 20:
        raise KvGuardError(
            f"{num_bytes >> 20} MiB for {what}, above {settings.most_mib} MiB",
            remedy="serve with larger pages, with fewer requests, or raise most_mib",
        )


def _read(path: Path) -> PluginSettings:
    try:
        document = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except (OSError, ValueError, RecursionError) as error:
        raise KvGuardError(
            f"cannot be read: {first_line(error)}", remedy=f"mend what {VARIABLE} names", file=path
        ) from error
    if not isinstance(document, dict):
        raise KvGuardError("is no JSON object", remedy='write {"mode": "abort"}', file=path)
    known = {field.name for field in fields(PluginSettings)}
    if unknown := sorted(document.keys() - known):
        raise KvGuardError(f"unknown key {unknown[0]!r}", remedy=f"known are {', '.join(sorted(known))}", file=path)
    return PluginSettings(**{name: _value(name, value, path) for name, value in {"mode": None, **document}.items()})


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A key that comes twice would mean what came last: it may be off."""
    names = [name for name, _ in pairs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{sorted(twice)[0]!r} comes twice")
    return dict(pairs)


def _is_text(value: str) -> bool:
    """Nothing in it that neither a file's name nor a digest can have."""
    try:
        return "\0" not in value and bool(value.encode())
    except UnicodeEncodeError:
        return False


def _can_be_written(path: Path) -> bool:
    try:
        return not path.is_dir() and path.parent.is_dir()
    except OSError:  # too long a name
        return False


def _value(name: str, value: object, path: Path) -> Any:
    """As its field holds it; null is what a path or a name may be."""
    if name == "mode":
        if not isinstance(value, str) or value not in set(Mode):
            raise KvGuardError(f"mode is {value!r}", remedy=f"choose {_modes()}", file=path)
        return Mode(value)
    if name in ("ring_lines", "most_mib"):
        if type(value) is not int or value < 1:
            raise KvGuardError(f"{name} is {value!r}", remedy="give a whole number above 0", file=path)
        return value
    if name == "secret" and value is not None:
        if not (isinstance(value, str) and len(value) >= _SECRET_CHARACTERS and _is_text(value)):
            remedy = f"give a text of {_SECRET_CHARACTERS} characters or more, as `openssl rand -hex 32` prints"
            raise KvGuardError("secret is no text, or too short a one", remedy=remedy, file=path)
        return value
    if value is not None and not (isinstance(value, str) and _is_text(value)):
        raise KvGuardError(f"{name} is {value!r}", remedy="give a text", file=path)
    if name == "model" or value is None:
        return value
    written = Path(str(value))
    if not _can_be_written(written):
        raise KvGuardError(
            f"{name} is {value!r}: no file can be written there",
            remedy="name a file in a folder that exists",
            file=path,
        )
    return written


def _modes() -> str:
    return ", ".join(Mode)
