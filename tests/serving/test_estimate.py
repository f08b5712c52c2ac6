"""The estimate against the figures that were published for GLM-5.2 on 8 x H200, TP8."""

from dataclasses import replace

import pytest

from quantkit.errors import SourceError
from quantkit.memory.gpus import GPUS
from quantkit.memory.model import model_from_config
from quantkit.memory.scheme import Scheme
from quantkit.memory.serving import MemoryRequest
from quantkit.serving.estimate import CONCURRENCIES, EFFICIENCY, estimate, rate_by_bytes, touched_share
from scripts.published_rates import FP8, INT4, table
from tests.memory.plans import model
from tests.published import published_config

# requests: ms saved by the bytes of experts (g32, g128), their share of the FP8 step, tokens a second (g32, g128)
WANTED = {
    1: ((0.29, 0.32), 4, (61, 61)),
    8: ((2.07, 2.29), 25, (477, 484)),
    16: ((3.67, 4.06), 36, (810, 826)),
    32: ((5.88, 6.51), 42, (1216, 1246)),
    64: ((8.01, 8.87), 48, (2114, 2176)),
}


def steps(group_size: int):
    scheme = Scheme(experts="int4", rest="bf16", group_size=group_size)
    found = estimate(model("glm-5.2"), MemoryRequest(gpu=GPUS["h200"], scheme=scheme), CONCURRENCIES)
    assert found.bandwidth == pytest.approx(4.3e12)
    return {one.concurrency: one for one in found.steps}


@pytest.mark.parametrize(("index", "group_size"), [(0, 32), (1, 128)])
def test_the_published_rates_against_bytes(index, group_size):
    for count, one in steps(group_size).items():
        saved_ms, share, rates = WANTED[count]
        assert 1e3 * one.saved_by_experts == pytest.approx(saved_ms[index], abs=0.011)
        step_seconds = count / FP8[count]
        assert 100 * one.fp8.experts / one.bandwidth / step_seconds == pytest.approx(share, abs=0.5)
        rate = rate_by_bytes(FP8[count], count, one.saved_by_experts)
        assert rate == pytest.approx(rates[index], abs=1)


def test_bytes_explain_the_gain_at_64_and_not_at_1():
    found = steps(32)
    ideal = {count: rate_by_bytes(FP8[count], count, one.saved_by_experts) for count, one in found.items()}
    assert ideal[64] > INT4[64]
    assert ideal[64] == pytest.approx(2110, abs=10)
    gain, explained = INT4[1] - FP8[1], ideal[1] - FP8[1]
    assert explained < 0.05 * gain
    # with the rest in BF16 a step of one request reads more than FP8 has
    assert found[1].ratio < 1 < found[8].ratio < found[64].ratio < found[64].experts_ratio


def test_the_table_that_the_readme_shows():
    assert table()[-1] == "| 64 | 1,672 | 2,115 (+26 %) | 1,933 (+16 %) |"
    assert table()[2] == "| 1 | 60 | 61 (+2 %) | 92 (+53 %) |"


@pytest.mark.parametrize(
    ("experts", "chosen", "count", "unique"),
    [(256, 8, 1, 8.0), (256, 8, 8, 57.4), (256, 8, 64, 222.4), (384, 8, 16, 109.8), (384, 8, 64, 284.2)],
)
def test_experts_that_a_step_touches(experts, chosen, count, unique):
    assert experts * touched_share(experts, chosen, count) == pytest.approx(unique, abs=0.06)


def test_expert_parallelism_deals_out_the_same_bytes():
    request = MemoryRequest(gpu=GPUS["h200"], scheme=Scheme(experts="int4", rest="bf16", group_size=32))
    plain = estimate(model("glm-5.2"), request, (16,)).steps[0]
    dealt = estimate(model("glm-5.2"), replace(request, parallel=replace(request.parallel, ep=8)), (16,)).steps[0]
    # a split expert has its weight_shape on every rank
    assert dealt.int4.experts == pytest.approx(plain.int4.experts, rel=1e-4)


def test_bandwidth_is_that_of_the_data_sheet():
    assert GPUS["h200"].bandwidth == 4.8e12
    assert pytest.approx(0.896, abs=0.001) == EFFICIENCY
    assert all(0.8e12 < gpu.bandwidth <= 8e12 for gpu in GPUS.values())


def test_a_config_that_does_not_say_how_many_experts_a_token_uses():
    config = {key: value for key, value in published_config("glm-5.2").items() if key != "num_experts_per_tok"}
    bare = model_from_config("bare", config, weights_from="config")
    with pytest.raises(SourceError, match="num_experts_per_tok"):
        estimate(bare, MemoryRequest(gpu=GPUS["h200"]), (1,))
