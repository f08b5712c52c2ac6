"""Splits that engines refuse: the rule, the number, the legal sizes."""

import pytest

from quantkit.engines.parallel import Parallel, stage_layers
from quantkit.errors import UsageError
from quantkit.memory.gpus import GPUS
from quantkit.memory.make import decide
from quantkit.memory.model import Model
from quantkit.memory.scheme import Scheme
from quantkit.memory.serving import MemoryRequest
from tests.memory.plans import FP8, INT4, INT4_FP8, model, plan, serving

TO_16, SMALLER = "--tp 1, 2, 4, 8, 16", "--group-size 32, 64"


def int4(group_size):
    return Scheme(experts="int4", rest="bf16", group_size=group_size)


@pytest.mark.parametrize(
    ("name", "parallel", "request_", "rule", "legal"),
    [
        ("glm-5.2", {"tp": 7}, {}, "64 attention heads do not divide by 7", "--tp 1, 2, 4, 8, 16"),
        ("glm-4.7-flash", {"tp": 8}, {}, "20 attention heads do not divide by 8", "--tp 1, 2, 4"),
        (
            "glm-4.7",
            {"tp": 8},
            {"scheme": int4(128)},
            "1536 / 8 = 192 columns per rank, not a whole",
            "--tp 1, 2, 4; --ep 8; --group-size 32, 64",
        ),
        ("glm-4.5-air", {"tp": 8}, {"scheme": INT4}, "1408 / 8 = 176 columns per rank", "--tp 1, 2, 4; --ep 8"),
        (
            "glm-5.2",
            {"tp": 32},
            {"scheme": int4(128)},
            "2048 / 32 = 64 columns",
            "--tp 1, 2, 4, 8, 16; --ep 32; --group-size 32, 64",
        ),
        ("glm-5.2", {"tp": 32}, {}, "2048 / 32 = 64 columns per rank, not whole FP8 blocks", "--tp 1, 2, 4, 8, 16"),
        ("glm-5.2", {"tp": 32}, {"scheme": INT4_FP8}, "the shared expert has 2048 / 32 = 64", "--tp 1, 2, 4, 8, 16"),
        ("glm-4.5", {"tp": 8}, {"scheme": FP8}, "not whole FP8 blocks of 128", "--tp 1, 2, 4"),
        ("glm-5.2", {"tp": 8, "ep": 3}, {}, "EP 3 does not divide TP 8", "--ep 1, 2, 4, 8"),
        ("glm-5.2", {"tp": 8, "ep": 2}, {"engine": "vllm"}, "EP is 1 or 8, not 2", "--tp 2; --ep 1, 8"),
        (
            "glm-5.2",
            {"tp": 8, "dp_attention": 3},
            {},
            "3 attention replicas do not divide",
            "--dp-attention 1, 2, 4, 8",
        ),
        ("glm-5.2", {"tp": 8, "pp": 79}, {}, "78 layers do not fill 79 pipeline stages", "--pp 1, 2, 4, 8, 16, 32"),
        ("glm-5.2", {"tp": 8, "dcp": 3}, {}, "DCP 3 does not divide the 8 ranks", "--dcp 1, 2, 4, 8"),
        ("glm-4.5", {"tp": 8, "dcp": 2}, {}, "does not use DCP", "--dcp 1"),
        ("glm-4.5", {"tp": 8, "dcp": 2}, {"engine": "vllm"}, "leave DCP 1 at most, not 2", "--tp 16, 32; --dcp 1"),
    ],
)
def test_refused(name, parallel, request_, rule, legal):
    with pytest.raises(UsageError) as error:
        plan(name, parallel=Parallel(**parallel), **request_)
    assert rule in error.value.message
    assert error.value.remedy == f"legal, all else equal: {legal}"


@pytest.mark.parametrize(
    ("parallel", "engine"),
    [({"pp": 200}, "sglang"), ({"ep": 3, "dp_attention": 3}, "sglang"), ({"tp": 4, "dcp": 16}, "vllm")],
)
def test_sizes_that_do_not_divide_are_refused_for_families_that_are_not_known_too(parallel, engine):
    with pytest.raises(UsageError, match="cannot split qwen3"):
        plan("qwen3-235b-a22b", engine=engine, parallel=Parallel(**parallel))


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_more_replicas_than_ranks_are_refused_in_our_words(engine):
    with pytest.raises(UsageError) as error:
        plan("glm-5.2", engine=engine, parallel=Parallel(tp=8, dp_attention=16))
    assert error.value.message == (
        f"{engine} cannot split glm-5.2 (FP8) with --tp 8 --dp-attention 16: 16 attention replicas do not divide TP 8"
    )
    with pytest.raises(AssertionError):
        _ = Parallel(tp=8, dp_attention=16).attention_tp


def test_the_split_is_checked_before_it_is_used(monkeypatch):
    def fail(model, scheme):
        raise AssertionError

    monkeypatch.setattr(Model, "tensors", fail)
    for parallel in (Parallel(tp=8, ep=3), Parallel(tp=8, dp_attention=3), Parallel(tp=7)):
        with pytest.raises(UsageError, match="cannot split"):
            decide(model("glm-5.2"), MemoryRequest(gpu=GPUS["h200"], parallel=parallel))


def test_the_verdict_on_the_split_is_kept():
    assert serving("glm-5.2").split.status == "ok"
    assert serving("qwen3-235b-a22b").split.status == "unknown"


@pytest.mark.parametrize("size", ["tp", "ep", "pp", "dp_attention", "dcp"])
def test_sizes_below_one_are_refused(size):
    with pytest.raises(UsageError, match="0 is no size; give one from 1 to 4096"):
        plan("glm-5.2", parallel=Parallel(**{size: 0}))


@pytest.mark.parametrize(
    ("name", "parallel", "request_", "kernels"),
    [
        ("glm-4.7", {"tp": 8, "ep": 8}, {"scheme": int4(128)}, ("marlin", "triton")),
        ("glm-5.2", {"tp": 32, "ep": 32, "dp_attention": 32}, {"scheme": INT4, "engine": "vllm"}, ("marlin",)),
        ("glm-5.2", {"tp": 8, "dcp": 8}, {}, ()),
        ("glm-4.5", {"tp": 16, "dcp": 2}, {"engine": "vllm"}, ()),
        ("kimi-k2.5", {"tp": 16, "ep": 4}, {}, ("marlin", "triton")),
        ("glm-5.2", {"tp": 64}, {"scheme": INT4}, ("triton",)),
    ],
)
def test_allowed(name, parallel, request_, kernels):
    request = MemoryRequest(gpu=GPUS["h200"], parallel=Parallel(**parallel), **request_)
    split = decide(model(name), request).split
    assert (split.status, split.kernels) == ("ok", kernels)
    assert plan(name, parallel=request.parallel, **request_).stages


def test_flags_are_the_engines_own():
    parallel = Parallel(tp=8, ep=8, dp_attention=4, pp=2)
    assert parallel.flags("sglang") == "--tp-size 8 --pp-size 2 --ep-size 8 --attn-dp-size 4"
    assert parallel.flags("vllm") == (
        "--tensor-parallel-size 2 --pipeline-parallel-size 2 --data-parallel-size 4 --enable-expert-parallel"
    )
    assert Parallel(tp=1).flags("sglang") == "--tp-size 1"


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize(("layers", "pp"), [(78, 1), (78, 4), (61, 2), (61, 7), (92, 3), (5, 5)])
def test_stages_cover_every_layer_once(layers, pp, engine):
    spans = stage_layers(layers, pp, engine)
    assert [layer for first, last in spans for layer in range(first, last)] == list(range(layers))
    assert max(last - first for first, last in spans) - min(last - first for first, last in spans) <= 1


def test_vllm_never_gives_the_last_stage_more():
    assert [last - first for first, last in stage_layers(7, 4, "vllm")] == [2, 2, 2, 1]
    assert [last - first for first, last in stage_layers(5, 4, "vllm")] == [1, 1, 2, 1]
    assert [last - first for first, last in stage_layers(7, 4, "sglang")] == [1, 2, 2, 2]


def test_a_family_whose_classes_were_not_read_says_so():
    assert "how engines split the family 'qwen3_moe' is not known" in " ".join(plan("qwen3-235b-a22b").assumptions)
    assert "not known" not in " ".join(plan("glm-5.2").assumptions)


@pytest.mark.parametrize(
    ("name", "parallel", "engine", "words"),
    [
        ("glm-5.2", {"tp": 8, "pp": 4}, "sglang", "78 layers over 4 stages: 19, 19, 20, 20, as sglang does"),
        ("glm-5.2", {"tp": 8, "pp": 4}, "vllm", "78 layers over 4 stages: 19, 20, 20, 19, as vllm does"),
        ("glm-4.5", {"tp": 16}, "sglang", "8 KV heads over 16 ranks: each stands on 2 of them"),
    ],
)
def test_what_is_uneven_is_said(name, parallel, engine, words):
    made = plan(name, parallel=Parallel(**parallel), engine=engine, context=4096)
    assert words in made.assumptions
    even = plan(name, parallel=Parallel(tp=8), engine=engine, context=4096)
    assert not [line for line in even.assumptions if "stages" in line or "stands on" in line]
