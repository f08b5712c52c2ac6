"""The benchmark's cases run, and what it compares with computes the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quantkit_kernels.reference import int4_gemm, int4_moe
from tests.kernels.compare import assert_close
from tests.kernels.test_int4_moe import experts, router, tokens
from tests.kernels.test_repack import random_int4

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
pytestmark = pytest.mark.gpu


def test_every_case_runs_once():
    command = [sys.executable, str(SCRIPTS / "bench_kernels.py"), "--once"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ), timeout=900)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    for kind in (
        "dense 64 x 256, M 5",
        "experts of small, M 5",
        "store dsa656",
        "decode flat576",
        "requantize 4 x 128",
    ):
        assert any(line.startswith(kind) and ": ran, " in line for line in lines), (kind, ran.stdout)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_timed():
    ran = subprocess.run(
        [sys.executable, str(SCRIPTS / "bench_kernels.py")], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert "torch sees no GPU" in ran.stderr


def test_the_usual_way_computes_the_same(device, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from naive_w4a16 import naive_gemm

    weight = random_int4((70, 160), 32, device)
    x = torch.randn((5, 160), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(device)
    expected = int4_gemm(x.double(), *weight, group_size=32)
    # weights and the output are rounded to BF16; the interpreter cuts the output off instead
    assert_close("usual", expected, naive_gemm(x, *weight, group_size=32), most=2.0**-7)


@pytest.mark.parametrize("num_tokens", [3, 9])
def test_experts_in_the_usual_way_compute_the_same(num_tokens, device, monkeypatch, poisoned_memory):
    """Blocks of 16 and of 64 pairs; the width is a multiple of neither tile."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from naive_w4a16 import naive_moe

    weights, x, routing = (
        experts(device, num_cols=160, width=96),
        tokens(num_tokens, device, num_cols=160),
        router(num_tokens, device),
    )
    expected = int4_moe(x.double(), *weights, *routing, group_size=32)
    # weights, hidden values, outputs and their sum are rounded to BF16
    assert_close("usual", expected, naive_moe(x, weights[:2], weights[2:], *routing), most=2.0**-7)
