"""What a plugin hooks into or calls: names and parameters as data, compared with the engine before any is wrapped."""

import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

from quantkit.errors import first_line
from quantkit.kv_guard.tracker import KvGuardError

_STARS: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


@dataclass(frozen=True, slots=True)
class Supported:
    """An engine. ``versions`` are patterns of those that were read (``0.33.*``); a post release is its release's."""

    name: str
    versions: tuple[str, ...]

    @property
    def remedy(self) -> str:
        """Where it is not as it was read."""
        return f"run {self.name} {', '.join(self.versions)}, for which this guard was written, or switch it off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A function or a class of an engine.

    ``parameters`` are all that it takes, as `parameters_of` writes them. ``given`` are the names by which the guard
    calls it: beside them may stand what can be left out. None: any.
    """

    name: str  # dotted: module, then attributes
    purpose: str
    parameters: str | None = None
    given: tuple[str, ...] | None = None


def check_version(version: str, supported: Supported) -> None:
    """Raises KvGuardError for a version that was not read."""
    release = re.split(r"\.post|\+", version, maxsplit=1)[0]
    if not any(fnmatchcase(release, pattern) for pattern in supported.versions):
        raise KvGuardError(f"{supported.name} {version} is not supported", remedy=supported.remedy)


def check_targets(targets: Iterable[Target], supported: Supported) -> dict[str, Any]:
    """What each name stands for. Raises KvGuardError for the first that is not there, or takes something else."""
    found = {}
    for target in targets:
        try:
            found[target.name] = resolve(target.name)
        except (ImportError, AttributeError) as error:
            raise refusal(target, f"is not there: {first_line(error)}", supported) from error
        _compare(target, found[target.name], supported)
    return found


def refusal(target: Target, how: str, supported: Supported) -> KvGuardError:
    """``how`` it is not as it was read."""
    return KvGuardError(f"{target.name} ({target.purpose}) {how}", remedy=supported.remedy)


def parameters_of(function: Any) -> str:
    """Names in their order, `=` behind those that may be left out, with `*` and `**` as in a definition."""
    parts, is_keyword_only = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword_only:
            parts.append("*")
        is_keyword_only |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = _STARS.get(parameter.kind, "")
        parts.append(stars + parameter.name + ("" if parameter.default is parameter.empty else "="))
    return ", ".join(parts)


def resolve(name: str) -> Any:
    """The longest part that is a module is imported; the rest are attributes."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        module_name = ".".join(parts[:end])
        try:
            found = import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
                continue  # not a module: an attribute of the one before
            raise
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(f"no module named {parts[0]!r}", name=parts[0])


def _compare(target: Target, found: Any, supported: Supported) -> None:
    if target.parameters is not None and (taken := parameters_of(found)) != target.parameters:
        raise refusal(target, f"takes ({taken}), not ({target.parameters})", supported)
    if target.given is None:
        return
    parameters = inspect.signature(found).parameters.values()
    by_name = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    if gone := [name for name in target.given if name not in by_name]:
        raise refusal(target, f"has no {gone[0]}", supported)
    needed = [one.name for one in parameters if one.default is one.empty and one.kind not in _STARS]
    if new := [name for name in needed if name not in target.given]:
        raise refusal(target, f"asks for {new[0]}", supported)
