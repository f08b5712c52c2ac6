"""Plans from real headers: forms that no config tells of, and headers that contradict the config."""

import pytest
import torch

from quantkit.checkpoint.source import open_checkpoint
from quantkit.engines.parallel import Parallel
from quantkit.errors import RecipeError, SourceError, UsageError
from quantkit.families import FAMILIES
from quantkit.memory.gpus import GPUS
from quantkit.memory.make import make_memory_plan
from quantkit.memory.model import model_from_checkpoint, model_from_config
from quantkit.memory.scheme import Scheme
from quantkit.memory.serving import MemoryRequest
from quantkit.memory.tensor_groups import group_stored
from quantkit.weights.binding import bind_weights
from quantkit.weights.completeness import check_complete
from tests.memory.plans import FP8, INT4
from tests.published import published_config

EXPERT = "model.layers.1.mlp.experts.0.gate_proj"


def read(source):
    source.write()
    return model_from_checkpoint("source", open_checkpoint(source.directory), weights_from="headers")


def num_bytes(groups):
    return sum(group.count * group.spec.num_bytes for group in groups)


def make(model, *, tp=1, **request):
    return make_memory_plan(model, MemoryRequest(gpu=GPUS["h200"], parallel=Parallel(tp=tp), **request))


def unknown_family(source):
    source.config |= {"model_type": "who_knows"}
    return source


@pytest.mark.parametrize("shape", [(128,), (4, 128, 256)])
def test_what_experts_hold_beside_matrices_stays_as_it_is(shape, tiny_checkpoint):
    source = unknown_family(tiny_checkpoint(model_type="deepseek_v3", source_format="bf16"))
    plain = num_bytes(read(source).tensors(INT4))
    extra = torch.zeros(shape, dtype=torch.bfloat16)
    source.put(f"{EXPERT}.bias", extra)
    assert num_bytes(read(source).tensors(INT4)) == plain + 2 * extra.numel()
    source.put("model.layers.1.mlp.experts.w13_weight", extra.clone())
    assert num_bytes(read(source).tensors(INT4)) == plain + 4 * extra.numel()


def test_an_expert_that_is_no_matrix_is_not_quantized(tiny_checkpoint):
    source = unknown_family(tiny_checkpoint(model_type="deepseek_v3", source_format="bf16"))
    source.put(f"{EXPERT}.weight", torch.zeros(77, dtype=torch.bfloat16))
    groups = read(source).tensors(INT4)
    assert any(group.spec.shape == (77,) and group.spec.num_bytes == 154 for group in groups)


@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "deepseek_v3"])
def test_fused_fp8_experts_are_planned_as_stored(model_type, tiny_checkpoint):
    whole = tiny_checkpoint(model_type=model_type)
    fused = tiny_checkpoint("fused", model_type=model_type, fused_experts=True)
    assert any(name.endswith("gate_up_proj_scale_inv") for shard in fused.shards.values() for name in shard)
    one, other = (make(read(source), context=128) for source in (whole, fused))
    # 128 rows of gate and up end with a block of scales, so that nothing is stored twice
    assert one.stages[0].weights == other.stages[0].weights


def test_stacked_experts_are_cut_as_what_they_are(tiny_checkpoint):
    """The last part of their names is the same."""
    source = unknown_family(tiny_checkpoint(model_type="deepseek_v3", source_format="bf16", fused_experts=True))
    for shard in source.shards.values():
        for name in [name for name in shard if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            shard[f"{name}.weight"] = shard.pop(name)
    source.write()
    groups = group_stored(FAMILIES["generic"], open_checkpoint(source.directory).tensors)
    cut = {group.place.module: group.spec.shape for group in groups if len(group.spec.shape) == 3}
    assert cut == {"gate_up_proj": (4, 256, 256), "down_proj": (4, 256, 128)}


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.q_a_proj.input_scale",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    ],
)
def test_what_no_engine_loads_does_not_count(name, tiny_checkpoint):
    source = tiny_checkpoint()
    plain = read(source)
    before = {scheme: num_bytes(plain.tensors(scheme)) for scheme in (plain.scheme, INT4)}
    source.put(name, torch.ones(16))
    after = read(source)
    assert {scheme: num_bytes(after.tensors(scheme)) for scheme in before} == before


def test_a_tensor_that_the_family_does_not_have_is_named(tiny_checkpoint):
    source = tiny_checkpoint()
    source.put("model.layers.0.self_attn.surprise.weight", torch.zeros(4, 4, dtype=torch.bfloat16))
    with pytest.raises(SourceError, match="is no tensor of the family glm_moe_dsa") as caught:
        make(read(source))
    assert caught.value.tensor == "model.layers.0.self_attn.surprise.weight"


def test_fp32_weights_count_as_the_16_bits_that_engines_load(tiny_checkpoint):
    single = make(read(tiny_checkpoint("f32", source_format="f32")), context=128)
    half = make(read(tiny_checkpoint("bf16", source_format="bf16")), context=128)
    router = 4 * 256 * 2  # is kept as it is
    assert single.stages[0].weights.num_bytes == half.stages[0].weights.num_bytes + router
    assert "weights that are stored in FP32 or FP64 count as 16 bits, as both engines load them" in single.assumptions
    assert not any("FP32" in text for text in half.assumptions)


def test_a_router_in_fp32_is_counted_and_called_as_it_is(tiny_checkpoint):
    source = tiny_checkpoint(source_format="bf16")
    plain = num_bytes(read(source).tensors(INT4))
    router = source.tensor("model.layers.1.mlp.gate.weight")
    source.put("model.layers.1.mlp.gate.weight", router.float())
    source.put("model.layers.1.mlp.rotary_emb.weight", torch.zeros(8))  # is left out, whatever its dtype
    assert num_bytes(read(source).tensors(INT4)) == plain + 2 * router.numel()
    assert read(source).remarks == ()
    norm = "model.layers.0.input_layernorm.weight"
    source.put(norm, source.tensor(norm).float())
    assert num_bytes(read(source).tensors(INT4)) == plain + 2 * router.numel()
    assert read(source).remarks == (
        "weights that are stored in FP32 or FP64 count as 16 bits, as both engines load them",
    )


@pytest.mark.parametrize(
    ("num_missing", "words"), [(1, "is"), (2, "and 1 more weight are"), (4, "and 3 more weights are")]
)
def test_missing_weights_are_counted(num_missing, words, tiny_checkpoint):
    source = tiny_checkpoint(source_format="bf16")
    names = [f"model.layers.1.mlp.experts.{expert}.gate_proj.weight" for expert in range(num_missing)]
    for name in names:
        source.shards[source.shard_of(name)].pop(name)
    message = f"config.json promises it, and it {words} missing"
    model = read(source)  # headers are read later
    with pytest.raises(SourceError) as planned:
        model.tensors(model.scheme)
    assert planned.value.message == message
    assert str(planned.value) == f"{names[0]}: {message}; plan from its config.json alone, or download the rest"
    checkpoint = open_checkpoint(source.directory)
    binding = bind_weights(checkpoint.tensors, model.form, model.family.fused_experts)
    with pytest.raises(SourceError) as converted:
        check_complete(model.family, checkpoint, binding, allow_incomplete=False)
    assert str(converted.value) == (
        f"{names[0]}: {message}; download the checkpoint again, or pass --allow-incomplete if it is meant to lack them"
    )


@pytest.mark.parametrize("scheme", [FP8, Scheme(experts="int4", rest="fp8", group_size=32)])
def test_what_would_be_fp8_in_an_unknown_family_is_not_known(scheme, tiny_checkpoint):
    model = read(unknown_family(tiny_checkpoint(model_type="deepseek_v3", source_format="bf16")))
    with pytest.raises(RecipeError, match="which of its weights an FP8 checkpoint holds is not known"):
        make(model, scheme=scheme)
    make(model, scheme=INT4)


def test_headers_that_contradict_the_config_are_refused(tiny_checkpoint):
    source = tiny_checkpoint()
    name = f"{EXPERT}.weight"
    kept = source.tensor(name)
    source.shards[source.shard_of(name)].pop(name)
    source.shards[source.shard_of(f"{name}_scale_inv")].pop(f"{name}_scale_inv")
    with pytest.raises(SourceError, match="promises it, and it is missing") as caught:
        make(read(source))
    assert caught.value.tensor == name
    assert caught.value.remedy == "plan from its config.json alone, or download the rest"
    source.put(name, kept)
    source.put(f"{name}_scale_inv", torch.ones(1, 2))
    make(read(source))
    source.config |= {"num_hidden_layers": 1}
    with pytest.raises(SourceError, match="lies beyond the 1 layers"):
        make(read(source))


def test_an_mtp_layer_that_the_headers_lack_is_said_and_is_not_loaded(tiny_checkpoint):
    source = tiny_checkpoint(config_changes={"num_nextn_predict_layers": 1})
    for tensors in source.shards.values():
        for name in [name for name in tensors if ".layers.2." in name]:
            tensors.pop(name)
    model = read(source)
    assert any("promises an MTP layer and the checkpoint has none" in text for text in make(model).assumptions)
    with pytest.raises(UsageError, match="has no MTP layer"):
        make(model, with_mtp=True)


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_embedding_stands_on_the_first_stage_and_on_the_last(tied, tmp_path, tiny_checkpoint):
    source = tiny_checkpoint(model_type="qwen3_moe", source_format="bf16", config_changes={"tie_word_embeddings": tied})
    embedding = source.tensor("model.embed_tokens.weight").numel() * 2
    request = MemoryRequest(gpu=GPUS["h200"], parallel=Parallel(tp=1, pp=2), context=128)
    stages = make_memory_plan(read(source), request).stages
    ends = [
        sum(part.num_bytes for part in stage.weights.parts if part.part.value == "embedding_and_head")
        for stage in stages
    ]
    assert ends == [embedding, embedding]
    whole = make(read(source), context=128).stages[0].weights
    assert sum(part.num_bytes for part in whole.parts if part.part.value == "embedding_and_head") == embedding * (
        1 if tied else 2
    )


@pytest.mark.parametrize(
    ("key", "value", "most"), [("num_hidden_layers", 10**6, 1000), ("n_routed_experts", 10**7, 4000)]
)
def test_counts_that_no_model_has_are_refused_before_they_are_enumerated(key, value, most, tiny_checkpoint):
    source = tiny_checkpoint(write=False)
    source.config |= {key: value}
    source.directory.mkdir(parents=True)
    with pytest.raises(SourceError, match=f"{key} is {value}, not a count from . to {most}"):
        make(read(source))


@pytest.mark.parametrize("number", ["1" * 5000, "0" * 5000 + "7"])
@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "who_knows"])
def test_a_number_of_any_length_is_a_layer_beyond_all(number, model_type, tiny_checkpoint):
    source = tiny_checkpoint()
    source.config |= {"model_type": model_type}
    name = f"model.layers.{number}.mlp.up_proj.weight"
    source.put(name, torch.zeros(4, 4, dtype=torch.bfloat16))
    with pytest.raises(SourceError, match="lies beyond the 2 layers") as caught:
        make(read(source))
    assert caught.value.tensor == name


@pytest.mark.parametrize("shape", [(1 << 40, 0, 256), (1 << 20, 0, 256), (0, 256, 256), (4, 256, 0), (4001, 1, 1)])
def test_fused_experts_without_end_are_refused(shape, tiny_checkpoint):
    source = tiny_checkpoint(source_format="bf16", fused_experts=True, write=False)
    prefix = "model.layers.1.mlp.experts."
    source.put(f"{prefix}gate_up_proj", torch.zeros(shape, dtype=torch.bfloat16))
    source.put(f"{prefix}down_proj", torch.zeros((shape[0], shape[2], shape[1]), dtype=torch.bfloat16))
    with pytest.raises(SourceError, match=r"does not hold 1 to 4000 experts|must be stored"):
        make(read(source))


def test_layers_times_experts_are_bounded(tiny_checkpoint):
    source = tiny_checkpoint(model_type="deepseek_v3", write=False)
    source.config |= {"num_hidden_layers": 1000, "n_routed_experts": 4000}
    source.write()
    with pytest.raises(SourceError, match="1000 layers of 4000 experts are more than any model has"):
        make(read(source))


@pytest.mark.parametrize("name", ["glm-5.2", "glm-4.5", "kimi-k2"])
def test_a_model_without_layers_is_refused(name):
    config = {**published_config(name), "num_hidden_layers": 0}
    with pytest.raises(SourceError, match="num_hidden_layers is 0, not a count from 1"):
        make(model_from_config(name, config, weights_from="config"))


@pytest.mark.parametrize("family", ["who_knows", "deepseek_v3"])
def test_a_layer_that_the_config_does_not_count_is_never_left_out(family, tiny_checkpoint):
    source = tiny_checkpoint(model_type="deepseek_v3", source_format="bf16")
    source.config |= {"model_type": family}
    make(read(source), context=128)
    prefix = "model." if family == "who_knows" else "other."
    source.put(f"{prefix}layers.9.mlp.experts.0.up_proj.weight", torch.zeros(4, 4, dtype=torch.bfloat16))
    with pytest.raises(SourceError, match="lies beyond the 2 layers that config") as caught:
        make(read(source), context=128)
    assert caught.value.tensor == f"{prefix}layers.9.mlp.experts.0.up_proj.weight"


def test_a_vision_part_may_have_more_layers(tiny_checkpoint):
    source = unknown_family(tiny_checkpoint(model_type="deepseek_v3", source_format="bf16"))
    plain = num_bytes(read(source).tensors(read(source).scheme))
    source.put("vision_tower.layers.9.mlp.fc0.weight", torch.zeros(4, 4, dtype=torch.bfloat16))
    assert num_bytes(read(source).tensors(read(source).scheme)) == plain + 32


def test_what_the_config_does_not_stand_for_is_counted_and_said(tiny_checkpoint):
    source = tiny_checkpoint(model_type="deepseek_v3", source_format="bf16")
    plain = make(read(source), context=128)
    assert not any("does not stand for" in text for text in plain.assumptions)
    names = ("lm_head.weight2", "foo.layers.1.mlp.experts.77.up_proj.weight", f"{EXPERT}.weird")
    for number, name in enumerate(names, 1):
        source.put(name, torch.zeros(4, 4, dtype=torch.bfloat16))
        made = make(read(source), context=128)
        assert made.stages[0].weights.num_bytes == plain.stages[0].weights.num_bytes + 32 * number
        (told,) = (text for text in made.assumptions if "does not stand for" in text)
        assert told.startswith("1 weight that" if number == 1 else f"{number} weights that")
        assert told.endswith(f"{32 * number} B in all")
        assert any(name in told for name in names)


def test_fp64_weights_count_as_16_bits_too(tiny_checkpoint):
    source = tiny_checkpoint(source_format="bf16")
    plain = make(read(source), context=128)
    name = "model.layers.0.input_layernorm.weight"
    source.put(name, source.tensor(name).double())
    made = make(read(source), context=128)
    assert made.stages[0].weights.num_bytes == plain.stages[0].weights.num_bytes
    assert any("FP32 or FP64 count as 16 bits" in text for text in made.assumptions)
