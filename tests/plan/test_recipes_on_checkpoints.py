"""Every shipped recipe converts a tiny checkpoint of its family, in the form that it reads."""

import json

import pytest

from quantkit.plan.make import make_plan
from quantkit.recipe import builtin_names, builtin_recipe
from quantkit.sources import resolve_source
from tests.convert.helpers import convert, load_output

MODEL_TYPES = {
    "glm_moe_dsa": "glm_moe_dsa",
    "glm4_moe": "glm4_moe",
    "deepseek_v3": "kimi_k2",
    "kimi_k25": "kimi_k25",
}
NATIVE = {"kimi-k2-thinking", "kimi-k2.5", "kimi-k2.6"}
BF16 = {"glm-4.5", "glm-4.6", "glm-4.7"}


@pytest.mark.parametrize("name", builtin_names())
def test_recipe_fits_a_checkpoint_of_its_family(name, tiny_checkpoint):
    form = "int4_native" if name in NATIVE else "bf16" if name in BF16 else "fp8_block"
    source = tiny_checkpoint(model_type=MODEL_TYPES[builtin_recipe(name).family], source_format=form)
    resolved = resolve_source(str(source.directory), recipe=name)
    plan = make_plan(resolved.recipe, resolved.family, resolved.checkpoint)
    experts = [job for job in plan.jobs if job.role == "routed_expert"]
    assert len(experts) == 12
    assert all(job.is_int4 for job in experts)
    assert not [job for job in plan.jobs if job.is_int4 and job.role != "routed_expert"]
    assert plan.rules[0].num_weights == 12


def test_rules_of_the_command_line_are_written_as_they_were_done(tiny_checkpoint, tmp_path):
    """A whole layer of experts left out: the config names what stayed, and no pattern hits what did not."""
    source = tiny_checkpoint(config_changes={"num_hidden_layers": 3})
    convert(source.directory, tmp_path / "out", ignore=[r"re:.*layers\.1\.mlp\.experts\..*"])
    output = load_output(tmp_path / "out")
    assert "model.layers.1.mlp.experts.0.up_proj.weight" in output
    assert "model.layers.2.mlp.experts.0.up_proj.weight_packed" in output
    ignore = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.1.mlp.experts.3.down_proj" in ignore
    assert "model.layers.1.mlp.experts.0.gate_up_proj" in ignore  # as an engine calls it
    assert not [entry for entry in ignore if "layers.2." in entry]
