"""Violations as JSON lines: the evidence, and no content of a user's. What a line says has `explain.py` in words."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import SourceError, first_line
from quantkit.kv_guard.faults import MOMENTS, Fault
from quantkit.kv_guard.identity import TAG_VERSION, PoolIdentity

if TYPE_CHECKING:
    from quantkit.kv_guard.violations import Violation

FORMAT = "quantkit-kv-incident"
_FIELDS = {"step", "check", "fault", "request", "row", "index", "page", "expected", "found", "pool", "time", "version"}


class IncidentFile:
    """Lines are added and flushed at once; no path, no file."""

    def __init__(self, path: Path | None, identity: PoolIdentity) -> None:
        self._path = path
        self._identity = identity

    def write(self, violations: Sequence["Violation"]) -> None:
        """A line each."""
        if self._path is None or not violations:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        head = {"format": FORMAT, "version": TAG_VERSION, "time": now, "pool": asdict(self._identity)}
        text = "".join(json.dumps(head | violation.document()) + "\n" for violation in violations)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)


def read_incidents(path: Path) -> list[dict[str, Any]]:
    """Raises SourceError, with the number of the line, for what this version did not write."""
    if not path.exists():
        remedy = "a guard makes it at its first violation: one that has found nothing has written no file"
        raise SourceError("does not exist", remedy=remedy, file=path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"cannot be read: {first_line(error)}", remedy="name an incident file", file=path) from error
    if lines and not lines[0].lstrip().startswith("{"):
        raise SourceError("is no incident file", remedy="name the file that the guard wrote", file=path)
    incidents = [_incident(line, number, path) for number, line in enumerate(lines, 1) if line.strip()]
    if not incidents:
        raise SourceError("holds no incident", remedy="name the file that the guard wrote", file=path)
    return incidents


def time_of(incident: Mapping[str, Any]) -> datetime:
    """When it was written, in UTC."""
    return datetime.fromisoformat(incident["time"]).astimezone(UTC)


def _incident(line: str, number: int, path: Path) -> dict[str, Any]:
    try:
        incident: dict[str, Any] = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"line {number} is no JSON: {first_line(error)}", remedy="it was cut or edited; remove that line", file=path
        ) from error
    if not _is_incident(incident):
        raise SourceError(f"line {number} is no incident", remedy="name the file that the guard wrote", file=path)
    if incident["version"] != TAG_VERSION:
        raise SourceError(
            f"line {number} is of version {incident['version']}, this is {TAG_VERSION}",
            remedy="explain it with the version that wrote it",
            file=path,
        )
    if incident["fault"] not in set(Fault) or incident["check"] not in MOMENTS:
        raise SourceError(
            f"line {number} has a fault or a check that this version does not know",
            remedy="explain it with the version that wrote it",
            file=path,
        )
    return incident


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no number")


def _is_incident(incident: Any) -> bool:
    """Has all that an explanation reads, in the types that it was written in."""
    if not isinstance(incident, dict) or incident.get("format") != FORMAT or not incident.keys() >= _FIELDS:
        return False
    tags = [incident["found"], *([incident["expected"]] if incident["expected"] is not None else [])]
    return (
        type(incident["step"]) is int
        and type(incident["version"]) is int
        and type(incident["page"]) is int
        and type(incident["fault"]) is str
        and type(incident["check"]) is str
        and _has_time(incident)
        and isinstance(incident["request"], str | None)
        and (incident["index"] is None or type(incident["index"]) is int)
        and (incident["row"] is None or type(incident["row"]) is int)
        and all(_is_tag(tag) for tag in tags)
    )


def _has_time(incident: Mapping[str, Any]) -> bool:
    try:
        return isinstance(incident["time"], str) and bool(time_of(incident))
    except (ValueError, OverflowError):
        return False


def _is_tag(tag: Any) -> bool:
    if not isinstance(tag, dict) or not tag.keys() >= {"generation", "owner", "index"}:
        return False
    return (tag["index"] is None or type(tag["index"]) is int) and all(
        isinstance(tag[name], str) and re.fullmatch("[0-9a-f]{16}", tag[name]) for name in ("generation", "owner")
    )
