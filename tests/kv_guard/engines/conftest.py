"""A guarded server for a test: its hooks are taken off again."""

import pkgutil
import sys
import types

import pytest

from quantkit.kv_guard.engines.settings import PluginSettings
from quantkit.kv_guard.engines.sglang.plugin import register
from quantkit.kv_guard.engines.sglang.targets import TARGETS
from quantkit.kv_guard.tracker import Mode
from tests.kv_guard.engines.serving_loop import Serving
from tests.kv_guard.engines.small_sglang.places import install, srt


@pytest.fixture
def engine(monkeypatch):
    """The miniature's modules, and what serves with them; the wheel's tests have another fixture of this name."""
    install(monkeypatch)
    return Serving


class Servers:
    """Start one under a guard: `serve(mode, **sizes)`; `stop` takes its hooks off, for another."""

    def __init__(self, engine):
        self._engine, self._taken = engine, {}

    def __call__(self, mode=Mode.ABORT, **sizes):
        settings = sizes.pop("settings", {})
        guard = register(PluginSettings(mode=mode, **settings))
        self._taken = {target.path: pkgutil.resolve_name(target.path) for target in TARGETS}
        srt("plugins.hook_registry").HookRegistry.apply_hooks()
        serving = self._engine(**sizes).start()
        serving.guard = guard
        return serving

    def stop(self):
        srt("plugins.hook_registry").HookRegistry.reset()
        for path, original in self._taken.items():
            owner, _, name = path.rpartition(".")
            hooked = pkgutil.resolve_name(path)
            setattr(pkgutil.resolve_name(owner), name, original)
            for module in list(sys.modules.values()):
                if isinstance(module, types.ModuleType) and vars(module).get(name) is hooked:
                    setattr(module, name, original)


@pytest.fixture
def serve(engine):
    servers = Servers(engine)
    yield servers
    servers.stop()
