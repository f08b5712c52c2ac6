"""What is planned for memory is what convert writes."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.source import open_checkpoint
from quantkit.engines.parallel import Parallel
from quantkit.families import family_of
from quantkit.memory.gpus import GPUS
from quantkit.memory.make import make_memory_plan
from quantkit.memory.model import model_from_checkpoint
from quantkit.memory.resolve import recipe_model
from quantkit.memory.scheme import Scheme
from quantkit.memory.serving import MemoryRequest
from quantkit.memory.tensor_groups import group_stored
from quantkit.plan.make import make_plan
from quantkit.recipe import builtin_recipe, override
from quantkit.weights.from_config import assumed_checkpoint
from tests import tiny
from tests.convert.helpers import convert
from tests.published import published_config

INT4 = Scheme(experts="int4", rest="bf16", group_size=32)


def bag(groups):
    return Counter({(group.place, group.spec): group.count for group in groups})


@pytest.mark.parametrize(
    ("recipe", "rest"),
    [("glm-5.2", "bf16"), ("glm-5.2", "fp8"), ("glm-5.2", "fp8-native"), ("kimi-k2", "fp8"), ("kimi-k2.5", "bf16")],
)
def test_every_tensor_of_a_recipe(recipe, rest):
    config = published_config(recipe)
    family = family_of(config)
    wanted = override(builtin_recipe(recipe), rest=rest)
    made = make_plan(wanted, family, assumed_checkpoint(config, Path("config.json")))
    planned = {
        name: StoredTensor(name, spec, Path("x"), 0) for shard in made.shards for name, spec in shard.specs.items()
    }
    assert len(planned) == made.num_tensors
    written = group_stored(family, planned)
    assert sum(group.count * group.spec.num_bytes for group in written) == made.tensor_bytes
    # a native checkpoint keeps its I32 weight_shape
    assert bag(written) == bag(recipe_model(recipe).tensors(replace(INT4, rest=rest)))


@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "kimi_k25"])
@pytest.mark.parametrize("switches", [{}, {"fused_experts": True}, {"source_format": "bf16"}])
def test_a_converted_checkpoint_is_what_was_planned_from_its_source(model_type, switches, tmp_path):
    source = tiny.write_checkpoint(tmp_path / "source", model_type=model_type, **switches)
    convert(source.directory, tmp_path / "output")
    before = model_from_checkpoint("source", open_checkpoint(source.directory), weights_from="headers")
    after = model_from_checkpoint("output", open_checkpoint(tmp_path / "output"), weights_from="headers")
    assert after.scheme == INT4
    planned, written = bag(before.tensors(INT4)), bag(after.tensors(INT4))
    if "fused_experts" not in switches:
        assert planned == written
    assert total(planned) == total(written)


def total(groups):
    return sum(spec.num_bytes * count for (_, spec), count in groups.items())


@pytest.mark.parametrize("source_format", ["fp8_tensor", "fp8_channel", "modelopt"])
def test_scales_of_a_whole_tensor_are_placed(source_format, tmp_path):
    source = tiny.write_checkpoint(tmp_path / "source", source_format=source_format)
    model = model_from_checkpoint("source", open_checkpoint(source.directory), weights_from="headers")
    assert str(model.scheme) == "FP8"
    groups = model.tensors(model.scheme)
    assert sum(group.count for group in groups) == len(open_checkpoint(source.directory).tensors)
    plans = [
        make_memory_plan(model, MemoryRequest(gpu=GPUS["h200"], parallel=Parallel(tp=tp), context=128)) for tp in (1, 2)
    ]
    whole, half = (plan.stages[0].weights for plan in plans)
    assert half.num_bytes < whole.num_bytes < 2 * half.num_bytes
    assert half.replicated_bytes == whole.replicated_bytes
