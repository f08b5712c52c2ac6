"""A guarded server for a test: its hooks are taken off again. Of vLLM a real one, too, where QUANTKIT_VLLM names it."""

import os
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
from tests.kv_guard.engines.small_vllm import harness

SECRET = "of prefill and decode servers"
_WHEEL = pytest.param(
    "wheel", marks=pytest.mark.skipif("QUANTKIT_VLLM" not in os.environ, reason="QUANTKIT_VLLM names no vLLM")
)


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
        settings = {"secret": SECRET} | sizes.pop("settings", {})
        guard = register(PluginSettings(mode=mode, **settings))
        self._taken = {target.name: pkgutil.resolve_name(target.name) for target in TARGETS}
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


@pytest.fixture(params=["miniature", _WHEEL])
def make(request, monkeypatch):
    """Makes an `Engine` in mode abort."""
    harness.environment(monkeypatch, "abort")
    if request.param == "miniature":
        with harness.miniature_installed():
            yield harness.Engine
        return
    from tests.kv_guard.engines.small_vllm import wheel

    with harness.miniature_installed(only_workers=True):
        yield wheel.WheelEngine


@pytest.fixture
def miniature(monkeypatch):
    """Under vLLM's names, in mode abort."""
    harness.environment(monkeypatch, "abort")
    with harness.miniature_installed():
        yield monkeypatch
