"""Weights a rank: published figures, placement, and headers against configs."""

import dataclasses
import json
from pathlib import Path

import pytest

from quantkit.checkpoint.source import open_checkpoint
from quantkit.engines.parallel import Parallel
from quantkit.errors import RecipeError, SourceError, UsageError
from quantkit.memory.budget import GIB
from quantkit.memory.gpus import gpu_named
from quantkit.memory.kv_format import KvDtype
from quantkit.memory.make import make_memory_plan
from quantkit.memory.model import model_from_checkpoint, model_from_config
from quantkit.memory.scheme import Scheme
from quantkit.memory.serving import MemoryRequest
from quantkit.memory.weights import Part
from quantkit.weights.from_config import assumed_checkpoint
from tests import tiny
from tests.memory.plans import FP8, INT4, INT4_FP8, INT4_NATIVE, model, plan
from tests.published import published_config

# a config of every family, FP8, BF16 and native INT4
ONE_OF_EACH = ("glm-5.2", "kimi-k2.5", "glm-4.5-air", "deepseek-v3.2", "glm-4.7-flash", "qwen3-235b-a22b-fp8")


def weights_gib(name, **request):
    return plan(name, **request).stages[0].weights_gib


def parts(stage):
    return {part.part: part for part in stage.weights.parts}


@pytest.mark.parametrize(
    ("scheme", "gib", "with_mtp_gib"),
    [
        (None, 88.18, 89.50),  # published: 88
        (INT4, 54.36, 55.22),
        (INT4_FP8, 51.67, 52.50),  # published: 52
        (INT4_NATIVE, 51.26, 52.09),
        (dataclasses.replace(INT4, group_size=64), 51.72, 52.55),
        (dataclasses.replace(INT4, group_size=128), 50.40, 51.22),
        (dataclasses.replace(INT4_FP8, group_size=128), 47.71, 48.49),
        (dataclasses.replace(INT4_NATIVE, group_size=128), 47.31, 48.08),  # w4afp8 but for the indexer's keys
    ],
)
def test_glm_5_2_at_tp_8(scheme, gib, with_mtp_gib):
    assert weights_gib("glm-5.2", scheme=scheme) == pytest.approx(gib, abs=0.006)
    assert weights_gib("glm-5.2", scheme=scheme, with_mtp=True) == pytest.approx(with_mtp_gib, abs=0.006)


@pytest.mark.parametrize(
    ("name", "tp", "gib"),
    [
        ("glm-5", 8, 88.69),
        ("kimi-k2", 8, 120.84),
        ("kimi-k2", 16, 61.00),
        ("kimi-k2-thinking", 8, 70.95),
        ("deepseek-v3", 8, 79.29),
        ("deepseek-v3.2", 8, 80.11),
        ("qwen3-235b-a22b-fp8", 4, 55.12),
    ],
)
def test_others(name, tp, gib):
    assert weights_gib(name, parallel=Parallel(tp=tp)) == pytest.approx(gib, abs=0.006)


@pytest.mark.parametrize(("scheme", "gib", "tokens"), [(INT4_FP8, 2.69, 53_568), (INT4_NATIVE, 3.10, 61_632)])
def test_what_rest_fp8_is_worth(scheme, gib, tokens):
    saved_gib = weights_gib("glm-5.2", scheme=INT4) - weights_gib("glm-5.2", scheme=scheme)
    assert saved_gib == pytest.approx(gib, abs=0.01)
    bf16, fp8 = (plan("glm-5.2", scheme=one, kv_dtype=KvDtype.FP8).num_tokens.mid for one in (INT4, scheme))
    assert fp8 - bf16 == pytest.approx(saved_gib * GIB / 53_940, abs=64)
    assert fp8 - bf16 == tokens


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_one_rank_holds_the_whole_checkpoint_without_copies_of_its_ends(name):
    config = published_config(name)
    stage = plan(name, parallel=Parallel(tp=1), with_mtp=bool(model(name).num_mtp_layers)).stages[0]
    checkpoint = assumed_checkpoint(config, Path("config.json"))
    last = model(name).num_layers
    copied = sum(
        tensor.spec.num_bytes
        for tensor in checkpoint.tensors.values()
        if f"layers.{last}." in tensor.name and ("embed_tokens" in tensor.name or "shared_head.head" in tensor.name)
    )
    assert stage.weights.num_bytes == checkpoint.num_bytes - copied


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_headers_and_config_give_the_same_groups(name):
    config = published_config(name)
    read = model_from_checkpoint(name, assumed_checkpoint(config, Path("config.json")), weights_from="headers")
    promised = model(name)
    assert set(read.tensors(read.scheme)) == set(promised.tensors(promised.scheme))
    assert sum(group.count for group in read.tensors(read.scheme)) == len(assumed_checkpoint(config, Path("c")).tensors)


@pytest.mark.parametrize("model_type", tiny.MODEL_TYPES)
def test_real_headers_and_config_agree(model_type, tmp_path):
    source = tiny.write_checkpoint(tmp_path / "tiny", model_type=model_type)
    checkpoint = open_checkpoint(source.directory)
    read = model_from_checkpoint("tiny", checkpoint, weights_from="headers")
    promised = model_from_config("tiny", json.loads((source.directory / "config.json").read_text()), weights_from="c")
    assert set(read.tensors(read.scheme)) == set(promised.tensors(promised.scheme))
    int4 = Scheme(experts="int4", rest="bf16", group_size=32)
    assert set(read.tensors(int4)) == set(promised.tensors(int4))


def test_replicated_parts_of_glm_5_2():
    stage = plan("glm-5.2").stages[0]
    assert stage.weights.replicated_bytes / GIB == pytest.approx(1.58, abs=0.005)
    found = parts(stage)
    assert found[Part.INDEXER].sharded_bytes == 0
    assert found[Part.ROUTER].sharded_bytes == 0
    assert found[Part.EXPERTS].replicated_bytes == 0
    assert found[Part.ATTENTION].replicated_bytes / GIB == pytest.approx(1.17, abs=0.005)


def test_expert_parallelism_deals_out_the_same_bytes():
    one = parts(plan("glm-5.2").stages[0])
    dealt = parts(plan("glm-5.2", parallel=Parallel(tp=8, ep=8)).stages[0])
    assert dealt[Part.EXPERTS].num_bytes == one[Part.EXPERTS].num_bytes
    assert dealt[Part.SHARED].num_bytes == one[Part.SHARED].num_bytes


def test_attention_replicas_hold_whole_attention():
    whole = parts(plan("glm-5.2", parallel=Parallel(tp=1)).stages[0])[Part.ATTENTION].num_bytes
    for engine in ("sglang", "vllm"):
        stage = plan("glm-5.2", engine=engine, parallel=Parallel(tp=8, ep=8, dp_attention=8)).stages[0]
        assert parts(stage)[Part.ATTENTION].num_bytes == whole


def test_head_and_dense_layers_of_replicas_are_cut_in_sglang_and_whole_in_vllm():
    parallel = Parallel(tp=8, ep=8, dp_attention=8)
    sglang, vllm = (parts(plan("glm-5.2", engine=engine, parallel=parallel).stages[0]) for engine in ("sglang", "vllm"))
    assert vllm[Part.DENSE].num_bytes == 8 * sglang[Part.DENSE].num_bytes
    assert vllm[Part.SHARED].num_bytes == 8 * sglang[Part.SHARED].num_bytes
    # embedding whole in both, the head only in vLLM
    assert vllm[Part.EMBEDDING_AND_HEAD].num_bytes * 9 == sglang[Part.EMBEDDING_AND_HEAD].num_bytes * 16


def test_pipeline_stages_hold_all_of_it_once():
    whole = plan("kimi-k2", parallel=Parallel(tp=8)).stages[0].weights.num_bytes
    for engine in ("sglang", "vllm"):
        stages = plan("kimi-k2", engine=engine, parallel=Parallel(tp=8, pp=2)).stages
        assert sum(stage.weights.num_bytes for stage in stages) == whole
        counts = [stage.stage.last - stage.stage.first for stage in stages]
        assert counts == ([30, 31] if engine == "sglang" else [31, 30])


@pytest.mark.parametrize(("engine", "counts"), [("sglang", [19, 19, 20, 20]), ("vllm", [19, 20, 20, 19])])
def test_layers_that_do_not_divide(engine, counts):
    stages = plan("glm-5.2", engine=engine, parallel=Parallel(tp=8, pp=4)).stages
    assert [stage.stage.last - stage.stage.first for stage in stages] == counts


def test_a_vision_tower_is_cut_as_the_engine_cuts_it():
    gib = {
        engine: parts(plan("kimi-k2.5", engine=engine, context=4096).stages[0])[Part.VISION].num_bytes / GIB
        for engine in ("sglang", "vllm")
    }
    assert gib == {"sglang": pytest.approx(0.65, abs=0.01), "vllm": pytest.approx(0.21, abs=0.01)}


def test_absorbed_copies():
    assert plan("glm-5.2").stages[0].copies_gib == pytest.approx(0.267, abs=0.001)
    assert plan("kimi-k2").stages[0].copies_gib == pytest.approx(0.119, abs=0.001)
    assert plan("glm-4.5").stages[0].copies_gib == 0
    # vLLM looks at a BF16 kv_b_proj from another side
    assert plan("glm-5.2", engine="vllm").stages[0].copies_gib == pytest.approx(0.267, abs=0.001)
    assert plan("glm-5.2", engine="vllm", scheme=INT4).stages[0].copies_gib == 0


def test_context_parallelism_costs_weights():
    plain = plan("glm-5", kv_dtype=KvDtype.FP8).stages[0].copies_gib
    dcp = plan("glm-5", kv_dtype=KvDtype.FP8, parallel=Parallel(tp=8, dcp=8)).stages[0].copies_gib
    assert dcp - plain == pytest.approx(2.44 + 0.91, abs=0.01)


def test_native_int4_is_never_requantized():
    with pytest.raises(RecipeError, match="never requantized"):
        plan("kimi-k2.5", scheme=dataclasses.replace(INT4, group_size=64))
    assert plan("kimi-k2.5", scheme=INT4).stages[0].weights == plan("kimi-k2.5").stages[0].weights


def test_fp8_of_a_bf16_source_needs_whole_blocks():
    with pytest.raises(UsageError, match="1536 / 8 = 192 columns per rank, not whole FP8 blocks of 128"):
        plan("glm-4.5", scheme=FP8)
    # 336.8 GiB with the MTP layer and its copies
    assert weights_gib("glm-4.5", scheme=FP8, parallel=Parallel(tp=4)) == pytest.approx(82.64, abs=0.01)


def test_a_bare_config_of_an_unknown_family_is_refused():
    with pytest.raises(SourceError, match="not a known family"):
        model_from_config("mystery", {"model_type": "mystery"}, weights_from="config")


def test_a_tensor_that_the_family_does_not_have_is_refused(tmp_path):
    source = tiny.write_checkpoint(tmp_path / "tiny", model_type="glm_moe_dsa")
    checkpoint = open_checkpoint(source.directory)
    name = "model.layers.0.mystery.weight"
    stored = next(iter(checkpoint.tensors.values()))._replace(name=name)
    strange = dataclasses.replace(checkpoint, tensors={**checkpoint.tensors, name: stored})
    read = model_from_checkpoint("tiny", strange, weights_from="headers")
    with pytest.raises(SourceError, match="is no tensor of the family") as error:
        read.tensors(read.scheme)
    assert error.value.tensor == name


def test_load_peak_is_a_layer_more_than_the_weights():
    stage = plan("glm-5.2", scheme=INT4).stages[0]
    assert stage.load_peak_gib - stage.weights_gib == pytest.approx(0.633 * 2 / 3, abs=0.001)
    stage = plan("glm-5.2", engine="vllm", scheme=INT4).stages[0]
    assert stage.load_peak_gib - stage.weights_gib == pytest.approx(0.633, abs=0.001)


@pytest.mark.parametrize("group_size", [7, 1_000_000_000])
def test_groups_that_do_not_divide_the_experts_are_refused(group_size):
    section = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size, "symmetric": True}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": section}}}
    config = published_config("qwen3-235b-a22b") | {"quantization_config": quantization}
    odd = model_from_config("odd", config, weights_from="config")
    with pytest.raises(SourceError, match=f"which groups of {group_size} do not divide") as caught:
        make_memory_plan(odd, MemoryRequest(gpu=gpu_named("h200")))
    assert caught.value.file == "config.json"
