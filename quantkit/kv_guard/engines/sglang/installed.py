"""What SGLang made of the hooks that were registered: it logs what goes wrong, and serves without them."""

import sys
import types
from collections.abc import Mapping
from typing import Any

from quantkit.kv_guard.engines.sglang.targets import SUPPORTED, TARGETS, HookTarget, Kind
from quantkit.kv_guard.engines.targets import refusal, resolve


def check_installed(originals: Mapping[str, Any]) -> None:
    """Raises KvGuardError for a target that is called past its hook, in its place or where it was imported."""
    for target in TARGETS:
        if target.kind is Kind.CALLED:
            continue
        original = originals[target.name]
        if original not in _layers(resolve(target.name)):
            raise refusal(target, "was not hooked: SGLang's log says why", SUPPORTED)
        if isinstance(original, types.FunctionType) and (module := _importer_of(original, target)):
            raise refusal(target, f"was not hooked where {module} imported it", SUPPORTED)


def _layers(function: Any) -> list[Any]:
    """What a hooked function wraps, itself left out."""
    layers = []
    while (function := getattr(function, "__wrapped__", None)) is not None:
        layers.append(function)
    return layers


def _importer_of(original: types.FunctionType, target: HookTarget) -> str | None:
    """A loaded module that still calls a module's function by its own name for it."""
    if "." in original.__qualname__:
        return None
    name = target.name.rsplit(".", 1)[1]
    return next(
        (n for n, module in list(sys.modules.items()) if getattr(module, "__dict__", {}).get(name) is original), None
    )
