"""Verdicts at both ends of the bands, their reasons, and advice that helps."""

import pytest

from quantkit.engines.parallel import Parallel
from quantkit.errors import UsageError
from quantkit.memory.gpus import GPUS, gpu_named
from quantkit.memory.kv_format import KvDtype
from quantkit.memory.make import make_memory_plan
from quantkit.memory.model import model_from_config
from quantkit.memory.plan import Tokens, Verdict
from quantkit.memory.serving import MemoryRequest
from tests.memory.plans import INT4, model, plan
from tests.published import published_config

FP8 = KvDtype.FP8


def test_it_fits():
    made = plan("glm-5.2", scheme=INT4, kv_dtype=FP8, context=131_072, concurrency=10, with_advice=True)
    assert made.verdict is Verdict.FITS
    assert made.reasons == (
        "the pool of every rank holds 1,328,960 tokens (1,316,032 to 1,334,912); "
        "10 x 131,072 = 1,310,720 are asked for",
    )
    assert made.num_tokens == Tokens(low=1_316_032, mid=1_328_960, high=1_334_912)
    assert made.advice == ()


def test_the_worst_end_decides_between_fits_and_tight():
    low, mid, _ = plan("glm-5.2", scheme=INT4, kv_dtype=FP8, context=1024).num_tokens
    fits = plan("glm-5.2", scheme=INT4, kv_dtype=FP8, context=1024, concurrency=low // 1024)
    tight = plan("glm-5.2", scheme=INT4, kv_dtype=FP8, context=1024, concurrency=mid // 1024)
    beyond = plan("glm-5.2", scheme=INT4, kv_dtype=FP8, context=1024, concurrency=mid // 1024 + 1)
    assert [made.verdict for made in (fits, tight, beyond)] == [Verdict.FITS, Verdict.TIGHT, Verdict.DOES_NOT_FIT]
    assert f"at worst {low:,}" in tight.reasons[0]


def test_too_few_tokens_are_counted():
    made = plan("glm-5.2", scheme=INT4, kv_dtype=FP8, context=131_072, concurrency=64)
    assert made.verdict is Verdict.DOES_NOT_FIT
    assert made.reasons == (
        "64 x 131,072 = 8,388,608 tokens are asked for on every rank, the pool holds 1,328,960: "
        "7,059,648 (354.65 GiB) too few",
    )


def test_weights_that_are_too_much_say_by_how_much():
    made = plan("glm-5.2", gpu="h100")
    assert made.verdict is Verdict.DOES_NOT_FIT
    assert any("88.80 GiB of the 61.28 GiB" in reason and "27.51 GiB too much" in reason for reason in made.reasons)
    assert any(reason.startswith("loading takes 88.45 GiB, 11.75 GiB more") for reason in made.reasons)
    assert made.num_tokens == (0, 0, 0)


def test_a_fraction_that_is_too_small_names_the_one_that_holds():
    made = plan("glm-5.2", kv_dtype=FP8, fraction=0.6, context=131_072)
    assert made.verdict is Verdict.DOES_NOT_FIT
    smallest = 0.695
    assert f"from --mem-fraction-static {smallest} on it holds" in made.reasons[0]
    assert plan("glm-5.2", kv_dtype=FP8, fraction=smallest, context=131_072).verdict is not Verdict.DOES_NOT_FIT
    assert plan("glm-5.2", kv_dtype=FP8, fraction=smallest - 0.001, context=131_072).verdict is Verdict.DOES_NOT_FIT


@pytest.mark.parametrize(
    ("name", "request_", "is_told"),
    [
        ("glm-5.2", {"engine": "sglang", "gpu": "mi355x"}, True),  # sparse attention has kernels of its own
        ("glm-4.5", {"engine": "vllm", "gpu": "mi355x"}, True),
        ("glm-4.5", {"engine": "sglang", "gpu": "mi355x"}, False),  # its kernels scale what is given
        ("glm-4.5", {"engine": "sglang", "gpu": "mi355x", "logged": frozenset({"fraction"})}, False),
        ("glm-4.5", {"engine": "sglang", "gpu": "h200"}, True),
    ],
)
def test_the_fraction_that_holds_is_told_where_the_engine_takes_it_as_given(name, request_, is_told):
    made = plan(name, fraction=0.3, context=131_072, concurrency=1, **request_)
    assert made.verdict is Verdict.DOES_NOT_FIT
    assert made.stages[0].budget.scales_fraction is not is_told
    assert all(("on it holds" in reason) is is_told for reason in made.reasons)


def test_the_fraction_that_holds_counts_the_engines_own_pages():
    """vLLM's pages of KV heads are 16 tokens: with 64 the fraction would be 0.723."""

    def of(fraction):
        return plan("glm-4.5", engine="vllm", fraction=fraction, context=241, concurrency=1000)

    assert all(reason.endswith("; from --gpu-memory-utilization 0.722 on it holds") for reason in of(0.6).reasons)
    assert of(0.722).num_tokens.mid >= 241_000 > of(0.721).num_tokens.mid


def test_a_fraction_that_leaves_too_little_for_the_overhead():
    made = plan("glm-5.2", kv_dtype=FP8, context=131_072, fraction=0.98)
    assert made.verdict is Verdict.DOES_NOT_FIT
    assert "of the 2.75 GiB that --mem-fraction-static 0.980 leaves it" in made.reasons[0]


def test_the_table_of_requests_counts_against_the_slack():
    # 2,048 requests of a million tokens: 8 GiB of the 15.7 that SGLang leaves
    made = plan("glm-5.2", kv_dtype=FP8)
    assert made.demand.context == 1_048_576
    assert made.verdict is Verdict.TIGHT
    assert "8.00 GiB" in made.stages[0].budget.overhead_source
    overhead = plan("glm-5.2", kv_dtype=FP8, with_mtp=True).stages[0].budget.overhead_source
    assert "table of 48 requests" in overhead


def test_not_one_request_of_the_models_context_is_no_fit():
    made = plan("kimi-k2")
    assert made.verdict is Verdict.TIGHT
    assert made.num_tokens.mid == 6602
    assert (
        "nothing was asked for (--context says what must fit); the server starts, and its pool holds 6,602 tokens: "
        "less than one request of the model's 131,072"
    ) in made.reasons


def test_what_is_asked_for_must_fit_and_without_it_the_server_must_start():
    asked = plan("kimi-k2", context=131_072)
    assert asked.verdict is Verdict.DOES_NOT_FIT
    by_number = plan("kimi-k2", concurrency=1)
    assert by_number.verdict is Verdict.DOES_NOT_FIT
    assert by_number.reasons[0].startswith(
        "1 x 131,072 (the model's full context: --context was not given) = 131,072 tokens are asked for"
    )
    assert plan("glm-4.7").reasons[0].endswith("; nothing was asked for (--context says what must fit)")
    vllm = plan("glm-5.2", engine="vllm").reasons[0]
    assert vllm.startswith("nothing was asked for (--context says what must fit); vLLM wants 1 x 1,048,576 = ")


def test_nothing_asked_for_is_tight_where_the_worst_end_is_below_one_request():
    mid = plan("kimi-k2", scheme=INT4, context=1024).num_tokens.mid
    config = {**published_config("kimi-k2"), "max_position_embeddings": mid}
    between = model_from_config("between", config, weights_from="config")
    made = make_memory_plan(between, MemoryRequest(gpu=GPUS["h200"], scheme=INT4))
    assert made.verdict is Verdict.TIGHT
    words = f", at worst {made.num_tokens.low:,}: less than one request"
    assert any(words in reason for reason in made.reasons)


def test_sparse_attention_without_a_backend_is_tight_at_best():
    words = "no backend for sparse attention on sm80 is known to work in SGLang"
    made = plan("glm-5.2", gpu="a100", scheme=INT4, kv_dtype=KvDtype.BF16, context=8192)
    assert (made.verdict, made.reasons) == (Verdict.TIGHT, (words,))
    assert words in plan("glm-5.2", gpu="a100").assumptions
    with pytest.raises(UsageError) as caught:
        plan("glm-5.2", gpu="a100", engine="vllm")
    assert caught.value.remedy == "choose another --gpu"


def test_stages_with_one_reason_are_told_together():
    made = plan("kimi-k2", gpu="l40s", parallel=Parallel(tp=8, pp=8), context=8192, fraction=0.3)
    assert made.verdict is Verdict.DOES_NOT_FIT
    told = [reason.partition(": ")[0] for reason in made.reasons]
    assert len(told) < 8
    assert any(one.startswith("stages ") and "-" in one for one in told)


@pytest.mark.parametrize(("concurrency", "told"), [(48, False), (64, True)])
def test_more_requests_than_sglang_runs_are_said(concurrency, told):
    made = plan("glm-5.2", gpu="b300", kv_dtype=FP8, with_mtp=True, context=32_768, concurrency=concurrency)
    words = "started with --max-running-requests 64: SGLang's default is 48"
    assert (words in made.assumptions) is told
    assert f"table of {concurrency} requests" in made.stages[0].budget.overhead_source


def test_a_given_number_of_requests_is_the_tables():
    made = plan("glm-5.2", kv_dtype=FP8, max_running_requests=64)
    assert (
        "table of 64 requests (--max-running-requests as given) x 1,048,576 tokens x 4 B = 0.25 GiB"
        in made.stages[0].budget.overhead_source
    )
    made = plan("glm-5.2", kv_dtype=FP8, max_running_requests=64, parallel=Parallel(dp_attention=8))
    assert "table of 8 requests" in made.stages[0].budget.overhead_source


def test_a_context_beyond_the_models_is_refused():
    with pytest.raises(UsageError, match="--context 2000000 is more than the 1048576 tokens"):
        plan("glm-5.2", context=2_000_000)


@pytest.mark.parametrize("name", ["kimi-k2", "qwen3-235b-a22b"])
def test_mtp_of_a_model_that_has_none_is_refused(name):
    with pytest.raises(UsageError, match="has no MTP layer"):
        plan(name, with_mtp=True)


def test_vllm_does_not_start_below_one_request():
    made = plan("glm-5.2", engine="vllm", kv_dtype=FP8)
    assert made.verdict is Verdict.DOES_NOT_FIT
    assert made.reasons[0].endswith("too few, and vLLM does not start below one request")
    assert plan("glm-5.2", engine="vllm", kv_dtype=FP8, context=131_072).verdict is Verdict.FITS


def test_vllm_refuses_a_share_that_is_not_free():
    made = plan("kimi-k2.5", engine="vllm", fraction=0.99, context=4096)
    assert made.verdict is Verdict.DOES_NOT_FIT
    assert "vLLM refuses to start: --gpu-memory-utilization 0.99 asks for 138.40 GiB, 137.40 GiB" in made.reasons[0]


def test_replicas_share_the_requests():
    made = plan("glm-5.2", scheme=INT4, kv_dtype=FP8, context=4096, concurrency=64, parallel=Parallel(dp_attention=8))
    assert (made.demand.concurrency, made.demand.per_replica, made.demand.tokens) == (64, 8, 32_768)
    assert made.requests_at_context == made.num_tokens.mid // 4096 * 8


def test_the_least_stage_holds_for_all():
    made = plan("glm-5.2", kv_dtype=FP8, parallel=Parallel(tp=8, pp=4))
    assert made.num_tokens.mid == min(stage.num_tokens.mid for stage in made.stages)
    assert len({stage.num_tokens.mid for stage in made.stages}) > 1
    assert [rank for rank, _ in made.ranks] == list(range(32))


def advice(name, **request):
    request = {"gpu": GPUS["h200"], **request}
    return make_memory_plan(model(name), MemoryRequest(**request))


@pytest.mark.parametrize(
    ("name", "request_", "words"),
    [
        ("glm-5.2", {"context": 131_072, "concurrency": 5}, "INT4 experts (--to int4): fits"),
        ("glm-5.2", {"context": 131_072, "concurrency": 8}, "INT4 experts and an FP8 KV cache (--to int4 --kv-dtype"),
        ("glm-5.2", {"context": 131_072, "concurrency": 4}, "FP8 KV cache (--kv-dtype fp8)"),
        ("glm-5.2", {"context": 131_072, "concurrency": 3}, "fewer requests (--concurrency 2)"),
        ("glm-5.2", {"context": 131_072, "concurrency": 10, "kv_dtype": FP8, "scheme": INT4}, ""),
        ("glm-5.2", {"gpu": GPUS["h100"], "context": 131_072}, "--tp 16 (16 GPUs): fits"),
        ("glm-5.2", {"gpu": GPUS["h100"], "context": 131_072}, "--gpu h200"),
        ("glm-5.2", {"gpu": GPUS["h100"], "context": 131_072}, "--pp 2 (16 GPUs): fits"),
        ("glm-5.2", {"scheme": INT4, "kv_dtype": FP8, "context": 32_768, "concurrency": 64}, "--dcp 8: fits"),
        (
            "glm-5.2",
            {"scheme": INT4, "kv_dtype": FP8, "context": 32_768, "concurrency": 64},
            "--dp-attention 8 --ep 8: fits",
        ),
        ("kimi-k2", {"context": 131_072}, "--to int4"),
    ],
)
def test_advice(name, request_, words):
    made = advice(name, **request_)
    if not words:
        assert made.advice == ()
        return
    assert made.verdict is not Verdict.FITS
    assert any(words in line for line in made.advice), made.advice


def test_group_size_and_rest_are_advised_where_they_decide():
    request = {"scheme": INT4, "kv_dtype": FP8, "context": 1024, "concurrency": 1350}
    made = advice("glm-5.2", **request)
    assert made.verdict is Verdict.DOES_NOT_FIT
    told = [line.split(":")[0] for line in made.advice]
    assert told[:2] == ["the rest in FP8 (--rest fp8)", "--group-size 128"]
    assert "--group-size 64" not in told
    made = advice("glm-5.2", **request | {"concurrency": 1283, "with_mtp": True})
    assert made.verdict is Verdict.DOES_NOT_FIT
    assert any(line.startswith("without MTP: fits") for line in made.advice)


def test_a_larger_gpu_is_advised_without_the_size_of_another():
    small = gpu_named("h200", total_gib=100.0)
    told = advice("glm-5.2", gpu=small, context=131_072).advice
    assert any(line.startswith("--gpu h200 and no --gpu-gib: fits") for line in told), told


def test_what_is_advised_is_what_is_planned():
    made = advice("glm-5.2", context=131_072, concurrency=4)
    line = next(line for line in made.advice if line.startswith("FP8 KV cache"))
    changed = advice("glm-5.2", context=131_072, concurrency=4, kv_dtype=FP8)
    assert line.endswith(f"{changed.num_tokens.mid:,} tokens a rank")
