"""The engine of the plugin tests: the miniature, and a real vLLM where QUANTKIT_VLLM names its folder."""

import os

import pytest

from tests.kv_guard import vllm_harness

_WHEEL = pytest.param(
    "wheel", marks=pytest.mark.skipif("QUANTKIT_VLLM" not in os.environ, reason="QUANTKIT_VLLM names no vLLM")
)


@pytest.fixture(params=["miniature", _WHEEL])
def make(request, monkeypatch):
    """Makes an `Engine` in mode abort."""
    vllm_harness.environment(monkeypatch, "abort")
    if request.param == "miniature":
        with vllm_harness.miniature_installed():
            yield vllm_harness.Engine
        return
    from tests.kv_guard import vllm_wheel

    with vllm_harness.miniature_installed(only_workers=True):
        yield vllm_wheel.WheelEngine


@pytest.fixture
def miniature(monkeypatch):
    """Under vLLM's names, in mode abort."""
    vllm_harness.environment(monkeypatch, "abort")
    with vllm_harness.miniature_installed():
        yield monkeypatch
