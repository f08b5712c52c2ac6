"""How engines divide a GPU: fractions, pools, bands and their sources."""

import dataclasses

import pytest

from quantkit.engines.parallel import Parallel
from quantkit.errors import UsageError
from quantkit.memory.budget import Band
from quantkit.memory.gpus import GPUS, gpu_named
from quantkit.memory.kv_format import KvDtype
from quantkit.memory.observations import OBSERVATIONS, overhead_band
from quantkit.memory.plan import Verdict
from quantkit.memory.sglang import default_fraction, running_requests
from scripts.ground_truth import ROWS, plan_of
from tests.memory.plans import INT4, INT4_FP8, plan, serving

FP8 = KvDtype.FP8


@pytest.mark.parametrize(
    ("gpu", "role", "fraction"),
    [
        ("h200", "both", 0.886),
        ("h200", "decode", 0.929),
        ("h200", "prefill", 0.893),
        ("h100", "both", 0.799),
        ("b200", "both", 0.844),
        ("b200", "decode", 0.944),
    ],
)
def test_sglangs_default_fraction(gpu, role, fraction):
    assert default_fraction(serving(gpu=gpu, role=role)) == fraction


def test_a_build_without_prefill_graphs_printed_the_same_fraction():
    # 0.908 was logged on MI355X; AMD has no prefill graphs, and GLM-5 ran with a 16,384 chunk and graphs to 512
    reserved_mib = 512 + 1.5 * 16_384 + 1024 + 2 * 512
    capacity_mib = GPUS["mi355x"].driver_mib
    assert default_fraction(serving(gpu="mi355x")) == 0.908 == round(1 - reserved_mib / capacity_mib, 3)


@pytest.mark.parametrize(
    ("changes", "reserved_mib"),
    [
        ({}, 512 + 12_288 + 1024 + 1024 + 1536),
        ({"parallel": Parallel(tp=2)}, 512 + 12_288 + 256 + 512 + 1536),
        ({"parallel": Parallel(tp=8, pp=2)}, 512 + 12_288 + 2048 + 1024),
        ({"parallel": Parallel(tp=8, dcp=8)}, 512 + 12_288 + 1024 + 1024),
        ({"parallel": Parallel(tp=8, dp_attention=8)}, 512 + 12_288 + 1024 + 1024 + 512 * 8 * 4.5 + 1536),
        ({"name": "glm-4.5"}, 512 + 12_288 + 1024 + 1024 + 8 * 58),
        ({"is_eager": True}, 512 + 12_288 + 1024),
        ({"role": "decode"}, 10_240),
        (
            {"role": "decode", "with_mtp": True, "max_running_requests": 1024, "parallel": Parallel(tp=8, pp=8)},
            512 + 6144 + 8192 + 1024,
        ),
        ({"role": "decode", "parallel": Parallel(tp=8, pp=8)}, 512 + 3072 + 8192 + 1024),
    ],
)
def test_what_the_default_reserves(changes, reserved_mib):
    capacity_mib = GPUS["h200"].driver_mib
    assert default_fraction(serving(**changes)) == round((capacity_mib - reserved_mib) / capacity_mib, 3)


def test_a_vision_tower_lowers_the_fraction():
    # 27 blocks of 1152: 0.95 x 0.957617
    stage = plan("kimi-k2.5").stages[0]
    assert stage.budget.fraction == pytest.approx(0.886 * 0.909736, abs=1e-6)
    assert plan("kimi-k2.5", role="decode").stages[0].budget.fraction == 0.929


def test_amds_kernels_lower_even_a_given_fraction():
    assert plan("glm-4.5", gpu="mi300x", fraction=0.9).stages[0].budget.fraction == pytest.approx(0.765)
    assert plan("glm-4.5", gpu="mi300x", fraction=0.9, context=8192).stages[0].budget.fraction == 0.9
    # eight heads a rank are not for these kernels, sixteen are; sparse attention has its own
    assert plan("kimi-k2", gpu="mi355x", fraction=0.9).stages[0].budget.fraction == 0.9
    parallel = Parallel(tp=4)
    assert plan("kimi-k2", gpu="mi355x", fraction=0.9, parallel=parallel).stages[0].budget.fraction < 0.8
    assert plan("glm-5.2", gpu="mi355x", fraction=0.9).stages[0].budget.fraction == 0.9


@pytest.mark.parametrize(
    ("tokens", "context", "requests"),
    [(1_300_000, 131_072, 4096), (600_000, 131_072, 2343), (381_824, 1_048_576, 2048), (1000, 131_072, 500), (0, 1, 1)],
)
def test_running_requests(tokens, context, requests):
    assert running_requests(serving(context=context), tokens) == requests


def test_speculation_runs_48_requests():
    assert running_requests(serving(with_mtp=True), 1_000_000) == 48
    assert running_requests(serving(with_mtp=True, parallel=Parallel(tp=8, dp_attention=4)), 1_000_000) == 12


def test_glm_5_2_on_h200():
    """What INT4 buys: the same rule on both sides."""
    tokens = {
        name: plan("glm-5.2", scheme=scheme, kv_dtype=FP8).num_tokens.mid
        for name, scheme in (("fp8", None), ("int4", INT4), ("int4, rest fp8", INT4_FP8))
    }
    assert tokens == {"fp8": 655_680, "int4": 1_328_960, "int4, rest fp8": 1_382_528}
    assert tokens["int4"] - tokens["fp8"] == 673_280
    assert tokens["int4, rest fp8"] - tokens["fp8"] == 726_848


def test_the_gain_does_not_depend_on_the_fraction():
    for fraction in (0.8, 0.85, 0.9):
        before, after = (
            plan("glm-5.2", scheme=scheme, kv_dtype=FP8, fraction=fraction).num_tokens.mid for scheme in (None, INT4)
        )
        assert after - before == pytest.approx(673_280, abs=64)


def test_no_layout_of_36_gib_gives_the_published_increment():
    """'1.18 million more tokens': 36 GiB would have to hold tokens of 32.8 kB."""
    gains = []
    for dtype in KvDtype:
        before, after = (plan("glm-5.2", scheme=scheme, kv_dtype=dtype).num_tokens.mid for scheme in (None, INT4_FP8))
        gains.append(after - before)
    assert gains == [pytest.approx(423_232, abs=128), pytest.approx(726_848, abs=128)]
    assert max(gains) < 0.65 * 1_180_000


def test_kimi_k2_6_context_in_the_pool_that_the_figures_imply():
    # 686 thousand tokens in BF16 and 1.37 million in FP8
    pool_bytes = 44.9 * 2**30
    cells = {dtype: plan("kimi-k2.6", kv_dtype=dtype).stages[0].cell.num_bytes for dtype in KvDtype}
    assert pool_bytes / cells[KvDtype.BF16] == pytest.approx(686_000, rel=0.001)
    assert pool_bytes / cells[FP8] == pytest.approx(1_370_000, rel=0.002)
    # and the plan's own pool is of that size
    planned = plan("kimi-k2.6", engine="vllm", fraction=0.9, kv_dtype=FP8)
    assert planned.stages[0].budget.pool.mid == pytest.approx(44.9, rel=0.05)
    assert planned.num_tokens.low == pytest.approx(1_370_000, rel=0.002)  # the worst that was logged is this server


def test_published_totals_of_glm_5_2():
    parallel = Parallel(tp=1)
    gib = {
        name: plan("glm-5.2", scheme=scheme, parallel=parallel, with_mtp=True).stages[0].weights_gib
        for name, scheme in (("fp8", None), ("int4", INT4))
    }
    assert gib["fp8"] == pytest.approx(705, rel=0.01)
    assert gib["int4"] == pytest.approx(421, rel=0.01)


def test_the_overhead_band_is_what_was_logged():
    """Utilization x total - pool - planned weights and copies, of the rows that it names."""
    logged = {}
    for row in ROWS:
        if row.engine == "vllm" and row.pool_gib is not None and row.fraction is not None:
            stage = plan_of(row).stages[0]
            total_gib = gpu_named(row.gpu).total_gib
            logged[row.name] = total_gib * row.fraction - row.pool_gib - stage.weights_gib - stage.copies_gib
    told = {one.server: one.overhead_gib for one in OBSERVATIONS}
    rows = {
        "GLM-5.1-FP8, 8 x H200, 0.19": "GLM-5.1-FP8, 8 x H200, vLLM 0.19, eager",
        "GLM-5.1-FP8, 8 x H200, later": "GLM-5.1-FP8, 8 x H200, vLLM later, eager",
        "Kimi-K2-Thinking, 8 x H200, 2025-11": "Kimi-K2-Thinking, 8 x H200, vLLM 2025-11",
    }
    for server_name, row_name in rows.items():
        assert told[server_name] == pytest.approx(logged[row_name], abs=0.06)
    assert {row.name for row in ROWS if row.calibrates} == set(rows.values())
    k2_6 = plan("kimi-k2.6", engine="vllm", context=4096).stages[0]
    assert told["Kimi-K2.6, 8 x H200, published context"] == pytest.approx(
        0.9 * 139.8 - 44.9 - k2_6.weights_gib - k2_6.copies_gib, abs=0.06
    )
    assert told["Kimi-K2.5, 8 x H100, 64 sequences of 8,192"] == pytest.approx(
        0.95 * 79.1 - 0.64 - k2_6.weights_gib - k2_6.copies_gib, abs=0.06
    )


def test_bands():
    h200 = GPUS["h200"]
    assert overhead_band(h200, is_eager=True, is_latent=True) == Band(low=2.0, mid=3.4, high=4.8)
    assert overhead_band(h200, is_eager=False, is_latent=True) == Band(low=3.3, mid=8.1, high=9.8)
    stage = plan("kimi-k2", engine="vllm", gpu="b300", context=4096).stages[0]
    assert stage.budget.pool.high - stage.budget.pool.low == pytest.approx(9.8 - 3.3)
    assert "Kimi-K2-Thinking, 8 x H200" in stage.budget.overhead_source


@pytest.mark.parametrize(
    ("gpu", "is_latent", "mid"),
    [("h100", True, 3.3), ("h100", False, 8.1), ("a100", True, 3.3), ("l40s", True, 8.1), ("b200", True, 8.1)],
)
def test_what_ran_on_gpus_of_no_more_memory_makes_the_middle(gpu, is_latent, mid):
    assert overhead_band(GPUS[gpu], is_eager=False, is_latent=is_latent) == Band(low=3.3, mid=mid, high=9.8)


def test_a_server_that_ran_is_not_rejected():
    """Kimi-K2.5 at 0.95 of 8 x H100: its log has a pool of 0.64 GiB, 9,800 tokens."""
    made = plan("kimi-k2.5", engine="vllm", gpu="h100", context=8192, fraction=0.95)
    assert made.verdict is Verdict.TIGHT
    assert made.stages[0].budget.pool.mid == pytest.approx(0.64, abs=0.06)


@pytest.mark.parametrize(
    ("gpu", "role", "words"),
    [
        ("h200", "both", "as servers of these models logged (9.8 GiB; SGLang estimates 15.50)"),
        ("h200", "decode", "as SGLang estimates them (5.00 GiB)"),
        ("l40s", "both", "as SGLang estimates them (8.81 GiB)"),
    ],
)
def test_the_words_name_the_bound_that_applies(gpu, role, words):
    budget = plan("glm-5.2", gpu=gpu, role=role, max_running_requests=None, context=8192).stages[0].budget
    assert budget.overhead_source.endswith(f"at most activations and graphs {words}")
    table_gib = budget.overhead.low - 1.66
    assert f"{budget.overhead.high - table_gib:.2f}" in words.replace("9.8 ", "9.80 ")


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"context": 1024}, "4,096 requests (SGLang's default --max-running-requests)"),
        ({"context": 1024, "with_mtp": True}, "48 requests (SGLang's default --max-running-requests with MTP)"),
        ({"context": 1024, "max_running_requests": 7}, "7 requests (--max-running-requests as given)"),
        ({"context": 64, "concurrency": 5000}, "5,000 requests (as asked for)"),
    ],
)
def test_the_table_says_whose_number_of_requests_it_has(request_, words):
    source = plan("glm-5.2", scheme=INT4, kv_dtype=FP8, **request_).stages[0].budget.overhead_source
    assert source.startswith(f"table of {words} x ")


@pytest.mark.parametrize("name", ["glm-5.2", "kimi-k2.5", "glm-4.5"])
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_segments_add_up_to_the_gpu(name, engine):
    for stage in plan(name, engine=engine, gpu="b300", parallel=Parallel(tp=8, pp=2), context=65_536).stages:
        assert sum(segment.gib for segment in stage.segments) == pytest.approx(GPUS["b300"].total_gib)
        assert all(segment.gib >= 0 for segment in stage.segments)


def test_the_draft_ends_take_room_while_the_pool_is_made_and_give_it_back():
    before, after = (plan("glm-5.2", with_mtp=mtp).stages[0] for mtp in (False, True))
    lost = before.budget.pool.mid - after.budget.pool.mid
    grown = after.weights_gib + after.copies_gib - before.weights_gib - before.copies_gib
    assert lost - grown == pytest.approx(2 * 154_880 * 6144 * 2 / 8 / 2**30, abs=1e-6)
    assert sum(segment.gib for segment in after.segments) == pytest.approx(139.8)


@pytest.mark.parametrize("fraction", [0, -0.5, 1.5, float("nan")])
def test_what_is_no_fraction_is_refused(fraction):
    with pytest.raises(UsageError, match="--mem-fraction-static"):
        plan("glm-5.2", fraction=fraction)


@pytest.mark.parametrize(
    ("name", "near"), [("h2000", "h200"), ("b20", "b200"), ("mi355", "mi355x"), ("rtx", "rtx-pro")]
)
def test_an_unknown_gpu_gets_the_nearest_names(name, near):
    with pytest.raises(UsageError, match=f"unknown GPU '{name}'") as error:
        gpu_named(name)
    assert near in error.value.remedy


def test_a_gpu_of_another_size():
    gpu = gpu_named("H200", total_gib=100.0)
    assert (gpu.total_gib, gpu.free_before_load_gib) == (100.0, pytest.approx(97.6))
    assert gpu.driver_mib == 143_771 - round(39.8 * 1024)
    assert gpu.title == "H200"
    assert dataclasses.replace(gpu, title="H200 141GB", total_gib=139.8, driver_mib=143_771) == GPUS["h200"]
