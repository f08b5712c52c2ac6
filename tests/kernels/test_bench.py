"""The benchmark's cases run, and what it compares with computes the same."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quantkit_kernels import dequantize_kv_mla
from quantkit_kernels.reference import int4_gemm, int4_moe, quantize_kv_mla
from quantkit_kernels.reference.int4 import dequantize_int4
from quantkit_kernels.requantize import Source, quantize
from tests.kernels.compare import assert_close, relative_mean
from tests.kernels.int4_weights import experts, random_int4, router, tokens

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
        "tags of 2 x 128, by token",
        "requantize 4 x 128",
    ):
        assert any(line.startswith(kind) and ": ran, " in line for line in lines), (kind, ran.stdout)


@pytest.mark.usefixtures("scripts")
def test_rows_to_decode_are_numbers(device):
    from bench_cases import random_rows

    rows = random_rows((64, 1152), device)
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float32):
        values = rows.view(dtype).float()
        assert bool(values.isfinite().all())
        assert len(values.unique()) > 50


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_timed():
    ran = subprocess.run(
        [sys.executable, str(SCRIPTS / "bench_kernels.py")], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert "torch sees no GPU" in ran.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_cases_run_in_the_interpreter_alone():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPTS / "bench_kernels.py"), "--once", "--only", "store"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("torch sees no GPU: set TRITON_INTERPRET=1")


@pytest.mark.parametrize("script", ["bench_kernels.py", "tune_kernels.py"])
@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--tokens", "abc", "argument --tokens: invalid numbers value: 'abc'"),
        ("--tokens", "4,0", "argument --tokens: invalid numbers value: '4,0'"),
        (
            "--only",
            "bogus",
            "--only takes of |argument --only: takes of dense, moe, store, mla, tags, requantize, not 'bogus'",
        ),
    ],
)
def test_a_value_that_is_none_is_named(script, option, value, words):
    command = [sys.executable, str(SCRIPTS / script), option, value]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert re.search(words, ran.stderr)


@pytest.fixture
def scripts(monkeypatch):
    """Scripts import each other by name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.mark.usefixtures("scripts")
def test_the_usual_way_computes_the_same(device):
    from naive_w4a16 import naive_gemm

    weight = random_int4((70, 160), 32, device)
    x = torch.randn((5, 160), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(device)
    expected = int4_gemm(x.double(), *weight, group_size=32)
    # weights and the output are rounded to BF16; the interpreter cuts the output off instead
    assert_close("usual", expected, naive_gemm(x, *weight, group_size=32), most=2.0**-7)


@pytest.mark.parametrize("num_tokens", [3, 9])
@pytest.mark.usefixtures("scripts", "poisoned_memory")
def test_experts_in_the_usual_way_compute_the_same(num_tokens, device):
    """Blocks of 16 and of 64 pairs; the width is a multiple of neither tile."""
    from naive_w4a16 import naive_moe

    weights, routing = experts(device, num_cols=160, width=96), router(num_tokens, device)
    x = tokens(num_tokens, device, num_cols=160)
    expected = int4_moe(x.double(), *weights, *routing, group_size=32)
    # weights, hidden values, outputs and their sum are rounded to BF16
    assert_close("usual", expected, naive_moe(x, weights[:2], weights[2:], *routing), most=2.0**-7)


@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.usefixtures("scripts")
def test_experts_by_torch_compute_the_same(num_tokens, device):
    """With fewer pairs than experts, and with more."""
    from bench_others import decode_experts, decoded_experts, grouped_experts

    weights, routing, x = experts(device), router(num_tokens, device), tokens(num_tokens, device)
    gate_up, down = weights[:2], weights[2:]
    expected = int4_moe(x.double(), *weights, *routing, group_size=32)
    # weights, gate and up, SiLU, hidden values and outputs are rounded to BF16
    got = grouped_experts(x, decode_experts(gate_up, 32), decode_experts(down, 32), *routing)
    assert_close("grouped", expected, got, most=2.0**-6)
    assert_close("decoded", expected, decoded_experts(x, gate_up, down, *routing, group_size=32), most=2.0**-6)


@pytest.mark.parametrize("layout", ["flat576", "dsa656"])
@pytest.mark.usefixtures("scripts")
def test_rows_by_torch_are_the_same(layout, device):
    from bench_others import eager_store

    generator = torch.Generator().manual_seed(5)
    latent, rope = (
        torch.randn((9, columns), generator=generator).to(torch.bfloat16).to(device) for columns in (512, 64)
    )
    slots = torch.randperm(20, generator=generator)[:9].to(device)
    caches = [torch.zeros((20, int(layout[-3:])), dtype=torch.uint8, device=device) for _ in range(2)]
    quantize_kv_mla(latent, rope, slots, caches[0], layout=layout)
    eager_store(latent, rope, slots, caches[1], layout=layout)
    stored = [torch.cat(dequantize_kv_mla(cache, slots, layout=layout), 1) for cache in caches]
    # a quotient that is rounded otherwise takes the next code, an eighth away, now and then
    assert relative_mean(*stored) <= 2.0**-9
    assert torch.count_nonzero(caches[1]) == torch.count_nonzero(caches[1][slots])


@pytest.mark.usefixtures("scripts")
def test_groups_by_torch_are_the_same(device):
    from bench_others import eager_absmax

    codes = torch.randint(0, 0x7F, (140, 256), dtype=torch.uint8, generator=torch.Generator().manual_seed(6))
    codes[3, 32:64] = 0
    source = Source(codes.to(device), torch.tensor([[0.5, 3.0], [1.0, 0.1]], device=device))
    expected, got = quantize(source, group_size=32, scales="absmax", signed=True), eager_absmax(source, group_size=32)
    decoded = [dequantize_int4(*one, group_size=32) for one in (expected, got)]
    # on a GPU torch divides by 7.5 as it multiplies by the reciprocal: a scale may be a BF16 step away
    assert_close("groups", *decoded, most=2.0**-9)


@pytest.mark.usefixtures("scripts")
def test_torch_alone_waits_for_no_value():
    """What looks at values, as a graph cannot, raises for tensors that have none."""
    from bench_others import eager_absmax, eager_store, grouped_experts

    with torch.device("meta"):
        x, gate_up, down = (
            torch.empty(shape, dtype=torch.bfloat16) for shape in ((9, 256), (4, 128, 256), (4, 256, 64))
        )
        ids, slots = torch.empty((9, 2), dtype=torch.int64), torch.empty(9, dtype=torch.int64)
        source = Source(torch.empty((140, 256), dtype=torch.uint8), torch.empty((2, 2)))
        latent, rope = torch.empty((9, 512), dtype=torch.bfloat16), torch.empty((9, 64), dtype=torch.bfloat16)
        assert grouped_experts(x, gate_up, down, torch.empty((9, 2)), ids).shape == x.shape
        for layout in ("flat576", "dsa656"):
            eager_store(latent, rope, slots, torch.empty((20, int(layout[-3:])), dtype=torch.uint8), layout=layout)
        assert eager_absmax(source, group_size=32).packed.shape == (140, 32)
        with pytest.raises(RuntimeError):
            ids.nonzero()


@pytest.mark.usefixtures("scripts")
def test_goals_say_what_was_met():
    from bench_cases import Case, Goal
    from bench_kernels import Timed, line_of

    goals = (Goal("us", 24, 18), Goal("% of copies", 50, 68), Goal("x usual Triton", 2, 4), Goal("x BF16", 2, 2))
    case = Case("experts", 40_000_000, lambda _: None, goals=goals)
    line = line_of(Timed(case, 20.0, {"usual Triton": 80.0}), 4e12)
    assert "| experts | 20.0 | 40.0 | 2.00 | 50 % | usual Triton 4.00x |" in line
    assert line.split(" | ")[-1] == (
        "must 24 us met, target 18 missed; must 50 % of copies met, target 68 missed; "
        "must 2 x usual Triton met, target 4 met; x BF16 unknown |"
    )


@pytest.mark.usefixtures("scripts")
def test_goals_stand_beside_the_cases_they_are_for():
    import bench_goals as goals

    assert [goals.expert_goals("glm-5.2", number)[0].must for number in (1, 8, 16, 32, 64)] == [24, 70, 120, 190, 260]
    assert goals.expert_goals("kimi-k2", 16)[0] == goals.Goal("us", 160, 112)
    assert goals.expert_goals("glm-5.2", 128) == goals.expert_goals("small", 1) == ()
    assert [goal.what for goal in goals.dense_goals(16384, 8192, 16)] == ["% of copies", "x BF16"]
    assert [goal.target for goal in goals.dense_goals(16384, 8192, 64)] == [1.8]
    assert [goals.tag_goals(number)[0].must for number in (8192, 32768)] == [3, 6]
    assert goals.tag_goals(65536) == ()
    assert goals.dense_goals(6144, 16384, 1) == goals.store_goals(128) == goals.requantize_goals("search") == ()
    assert [goal.what for goal in goals.decode_goals("flat576", 8, 32768)] == ["TB/s", "x BF16 rows"]
    assert [goal.what for goal in goals.decode_goals("dsa656", 8, 8192)] == ["x BF16 rows"]
    assert goals.decode_goals("bf16", 64, 32768) == ()
