"""What SGLang loads: the entry point of the group `sglang.srt.plugins`.

SGLang catches what a plugin raises, logs it and serves without the plugin. A server that was told to abort or to halt
must not run unguarded, so that a refusal then ends the process that loads the plugin (SystemExit, which is not caught).
"""

import importlib
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.kv_guard.engines.settings import PluginSettings
    from quantkit.kv_guard.engines.sglang.guard import Guard

_log = logging.getLogger(__name__)


def load() -> None:
    """Register the hooks, as `QUANTKIT_KV_GUARD` says. Where it is not set nothing is imported."""
    if "QUANTKIT_KV_GUARD" not in os.environ:  # settings.VARIABLE, from where nothing may be imported yet
        return
    from quantkit.kv_guard.engines.refusals import Refusals
    from quantkit.kv_guard.engines.settings import read_settings
    from quantkit.kv_guard.tracker import KvGuardError, Mode

    try:
        settings = read_settings(os.environ)
    except KvGuardError as error:
        raise SystemExit(f"the KV guard refuses: {error}") from error
    if settings.mode is Mode.OFF:
        return
    try:
        with Refusals(settings.mode, _log).refusing():
            register(settings)
    except KvGuardError as error:
        raise SystemExit(f"the KV guard refuses: {error}") from error


def register(settings: "PluginSettings") -> "Guard":
    """Raises KvGuardError, before any hook is registered, where SGLang is not as it was read, or is guarded already."""
    from quantkit.kv_guard.engines.sglang.guard import Guard
    from quantkit.kv_guard.engines.sglang.targets import ROOT, SUPPORTED, TARGETS, Kind
    from quantkit.kv_guard.engines.targets import check_targets, check_version
    from quantkit.kv_guard.tracker import KvGuardError

    check_version(importlib.import_module("sglang.version").__version__, SUPPORTED)
    registry = importlib.import_module(ROOT + "plugins.hook_registry")
    if any(_is_ours(hook) for hooks in registry.HookRegistry._hooks.values() for _, hook, _ in hooks):
        raise KvGuardError("the guard is loaded in this process already", remedy="install the plugin once")
    guard = Guard(settings, check_targets(TARGETS, SUPPORTED))
    hooks = _hooks_of(guard)
    for target in TARGETS:
        if target.kind is not Kind.CALLED:
            registry.HookRegistry.register(target.name, hooks(target.hook), registry.HookType(target.kind))
    _log.info("KV guard: mode %s", settings.mode)
    return guard


def _is_ours(hook: Callable[..., Any]) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("quantkit.kv_guard.engines.sglang.")


def _hooks_of(guard: "Guard") -> Callable[[str], Callable[..., Any]]:
    """Hooks by file and method."""
    from quantkit.kv_guard.engines.sglang.aborts import Aborts
    from quantkit.kv_guard.engines.sglang.allocation import AllocationHooks
    from quantkit.kv_guard.engines.sglang.caching import CachingHooks
    from quantkit.kv_guard.engines.sglang.startup import StartupHooks
    from quantkit.kv_guard.engines.sglang.steps import StepHooks
    from quantkit.kv_guard.engines.sglang.transfers import TransferHooks

    aborts, allocation = Aborts(guard), AllocationHooks(guard)
    by_file = {
        "startup": StartupHooks(guard),
        "allocation": allocation,
        "transfers": TransferHooks(guard, allocation),
        "caching": CachingHooks(guard),
        "steps": StepHooks(guard, aborts),
        "aborts": aborts,
    }

    def hook(name: str) -> Callable[..., Any]:
        file, method = name.split(".")
        found: Callable[..., Any] = getattr(by_file[file], method)
        return found

    return hook
