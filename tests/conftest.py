"""Shared fixtures: a small checkpoint with every switch that the field bugs need, and the two comparisons."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.tiny import TinyCheckpoint, write_checkpoint

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
settings.register_profile("dev", deadline=None, max_examples=50)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# a suite that a shell started in the background ignores SIGINT, and so would what it starts
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# without a GPU the kernels run in Triton's interpreter, which must be chosen before they are imported
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

MakeCheckpoint = Callable[..., TinyCheckpoint]


@pytest.fixture
def tiny_checkpoint(tmp_path: Path) -> MakeCheckpoint:
    """Writes a checkpoint below the test's own directory; keyword arguments are the switches of tests/tiny.py."""

    def make(name: str = "source", **switches: object) -> TinyCheckpoint:
        return write_checkpoint(tmp_path / name, **switches)  # type: ignore[arg-type]

    return make
