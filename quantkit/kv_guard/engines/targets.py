"""What a plugin hooks into: names and parameters as data, compared with the engine before anything is wrapped."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from quantkit.errors import first_line
from quantkit.kv_guard.tracker import KvGuardError

_MARK = "quantkit_kv_guard_original"
_STARS: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


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


def check_targets(targets: Sequence[Target], supported: str) -> dict[str, Any]:
    """What each name stands for. Raises KvGuardError for the first that is not there, or takes something else."""
    found = {}
    for target in targets:
        found[target.name] = _find(target, supported)
        _compare(target, found[target.name], supported)
    return found


def wrap(name: str, wrapper_of: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let the attribute at a dotted ``name`` be ``wrapper_of`` what it is; once, however often a plugin is loaded."""
    holder = _resolve(name.rpartition(".")[0])
    leaf = name.rpartition(".")[2]
    original = getattr(holder, leaf)
    if hasattr(original, _MARK):
        return
    wrapper = functools.wraps(original)(wrapper_of(original))
    setattr(wrapper, _MARK, original)
    setattr(holder, leaf, wrapper)


def original_of(function: Any) -> Any:
    """What was there before `wrap`; None where it was not wrapped."""
    return getattr(function, _MARK, None)


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


def _find(target: Target, supported: str) -> Any:
    try:
        return _resolve(target.name)
    except (ImportError, AttributeError) as error:
        raise KvGuardError(
            f"{target.name}, which {target.purpose}, is not there: {first_line(error)}",
            remedy=f"run {supported}, for which this guard was written, or switch it off",
        ) from error


def _compare(target: Target, found: Any, supported: str) -> None:
    if target.parameters is not None and (taken := parameters_of(found)) != target.parameters:
        raise _differs(target, f"takes ({taken}), not ({target.parameters})", supported)
    if target.given is None:
        return
    parameters = inspect.signature(found).parameters.values()
    by_name = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    if gone := [name for name in target.given if name not in by_name]:
        raise _differs(target, f"has no {gone[0]}", supported)
    needed = [one.name for one in parameters if one.default is one.empty and one.kind not in _STARS]
    if new := [name for name in needed if name not in target.given]:
        raise _differs(target, f"asks for {new[0]}", supported)


def _differs(target: Target, how: str, supported: str) -> KvGuardError:
    return KvGuardError(
        f"{target.name}, which {target.purpose}, {how}",
        remedy=f"run {supported}, for which this guard was written, or switch it off",
    )


def _resolve(name: str) -> Any:
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
