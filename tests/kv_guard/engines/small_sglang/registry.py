"""The hook registry: hooks are kept, applied together, and what goes wrong is logged and swallowed."""

import functools
import logging
import pkgutil
import sys
import types
from collections import defaultdict
from enum import Enum
from typing import ClassVar

from tests.kv_guard.engines.small_sglang.places import at

_log = logging.getLogger(__name__)


@at("plugins.hook_registry")
class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


@at("plugins.hook_registry")
class HookRegistry:
    _hooks: ClassVar = defaultdict(list)
    _patched: ClassVar = set()

    @classmethod
    def register(cls, target, hook, hook_type=HookType.AFTER, *, source=None):
        cls._hooks[target].append((hook_type, hook, source))

    @classmethod
    def apply_hooks(cls):
        for target, hooks in cls._hooks.items():
            if target in cls._patched:
                continue
            try:
                cls._apply_target(target, hooks)
                cls._patched.add(target)
            except Exception:  # noqa: BLE001  what SGLang does
                _log.exception("Failed to apply hooks to %s", target)

    @classmethod
    def _apply_target(cls, target, hooks):
        path, name = target.rsplit(".", 1)
        owner = pkgutil.resolve_name(path)
        original = wrapped = getattr(owner, name)
        for hook_type, hook, _ in hooks:
            wrapped = _wrap(wrapped, hook, hook_type)
        setattr(owner, name, wrapped)
        for module in list(sys.modules.values()):
            if isinstance(module, types.ModuleType) and module is not owner:
                for key, value in list(vars(module).items()):
                    if value is original:
                        setattr(module, key, wrapped)

    @classmethod
    def reset(cls):
        cls._hooks.clear()
        cls._patched.clear()


def _wrap(original, hook, hook_type):
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        if hook_type is HookType.AROUND:
            return hook(original, *args, **kwargs)
        if hook_type is HookType.BEFORE:
            changed = hook(*args, **kwargs)
            args, kwargs = changed if changed is not None else (args, kwargs)
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        changed = hook(result, *args, **kwargs)
        return result if changed is None else changed

    return wrapper
