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


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A function or a class of an engine. ``parameters`` are all that it takes, in their order; None: any."""

    name: str  # dotted: module, then attributes
    purpose: str
    parameters: tuple[str, ...] | None = None


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


def _find(target: Target, supported: str) -> Any:
    try:
        return _resolve(target.name)
    except (ImportError, AttributeError) as error:
        raise KvGuardError(
            f"{target.name}, which {target.purpose}, is not there: {first_line(error)}",
            remedy=f"run {supported}, for which this guard was written, or switch it off",
        ) from error


def _compare(target: Target, found: Any, supported: str) -> None:
    if target.parameters is None:
        return
    taken = tuple(inspect.signature(found).parameters)
    if taken != target.parameters:
        differences = [f"{name} is new" for name in taken if name not in target.parameters]
        differences += [f"{name} is gone" for name in target.parameters if name not in taken]
        raise KvGuardError(
            f"{target.name}, which {target.purpose}, takes others than were expected: "
            f"{', '.join(differences) or 'their order is another'}",
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
