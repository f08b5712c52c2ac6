"""What the commands say of engines: plan, convert and verify, of our outputs and of other tools'."""

import json
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from quantkit.cli.planning import PlanRequest, plan_request
from quantkit.cli.recipe_options import RecipeOptions
from quantkit.engines.parallel import ENGINES, Parallel
from quantkit.engines.verdicts import Outcome
from quantkit.recipe_files import recipes_directory
from quantkit.verify.loading import check_plan, launches_of
from tests.cli.test_commands import document, run


@pytest.mark.parametrize("name", ["glm-5", "glm-5.2", "glm-4.6", "kimi-k2", "kimi-k2.5"])
def test_every_recipe_loads_in_its_engines_with_the_flags_that_it_gives(name):
    """From the published config alone: every name and shape of the output."""
    config = recipes_directory() / "configs" / f"{name}.json"
    _, plan = plan_request(PlanRequest(source=None, options=RecipeOptions(recipe=name), config=config))
    launches = [replace(launch, parallel=Parallel(tp=8)) for launch in launches_of(plan.recipe)]
    assert {launch.engine for launch in launches} == set(ENGINES)
    for report in check_plan(plan, launches):
        assert report.worst is Outcome.LOADS, report.rows[0]
        assert report.num_modules > 400


def test_verify_says_of_every_module_whether_an_engine_loads_it(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(mtp=True).directory
    output = tmp_path / "out"
    assert run("convert", source, "-o", output, "-q").returncode == 0
    for engine in ENGINES:
        result = run("verify", output, "--engine", engine, "--tp", "2", "--json")
        assert result.returncode == 0, result.stdout
        found = document(result, "verify")
        assert found["engine"]["worst"] == "loads"
        assert f"loading by {engine}" in found["checks"]
        schemes = {one["modules"]: one["scheme"] for one in found["engine"]["modules"]}
        draft = {"sglang": "model.decoder", "vllm": "model.layers.{1-2}"}[engine]
        assert schemes[f"{draft}.mlp.experts"] == "INT4 in groups of 32"
    text = run("verify", output, "--engine", "sglang").stdout
    assert "sglang 0.5.23 loads all" in text
    result = run("verify", output, "--engine", "sglang", "--tp", "2", "--backend", "deepep")
    assert result.returncode == 4
    assert "--format w4afp8" in result.stdout + result.stderr
    assert run("verify", output, "--engine", "sglang", "--tp", "8", "--ep", "4").returncode == 4  # four heads
    split = ("--tp", "8", "--ep", "4", "--dp-attention", "2")
    assert run("verify", output, "--engine", "sglang", *split).returncode == 0
    result = run("verify", output, "--engine", "vllm", "--tp", "8", "--json")
    assert result.returncode == 4
    assert "heads" in document(result, "verify")["findings"][0]["message"]


def test_a_directory_of_another_tool_is_looked_at_for_an_engine(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    output = tmp_path / "out"
    assert run("convert", source, "-o", output, "-q").returncode == 0
    (output / "conversion.json").unlink()
    assert run("verify", output).returncode == 4
    result = run("verify", output, "--engine", "vllm", "--json")
    assert result.returncode == 0, result.stdout
    found = document(result, "verify")
    assert "has no manifest of ours" in found["findings"][0]["message"]
    shard = next(path for path in output.glob("*.safetensors") if any("o_proj" in name for name in load_file(path)))
    tensors = load_file(shard)
    name = next(name for name in tensors if name.endswith("self_attn.o_proj.weight"))
    del tensors[name]
    save_file(tensors, shard, {"format": "pt"})
    index = json.loads((output / "model.safetensors.index.json").read_text())
    del index["weight_map"][name]
    (output / "model.safetensors.index.json").write_text(json.dumps(index))
    result = run("verify", output, "--engine", "vllm", "--json")
    assert result.returncode == 4
    first = document(result, "verify")["engine"]["modules"][0]
    assert (first["outcome"], first["tensor"]) == ("loads silently wrong", name)


def test_what_is_not_known_is_never_called_good(tiny_checkpoint):
    result = run("verify", tiny_checkpoint().directory, "--engine", "vllm")
    assert result.returncode == 0
    assert "how vllm reads 'fp8' checkpoints is not stated here" in result.stdout
    assert "nothing is known to be wrong" in result.stdout
    assert "good" not in result.stdout


RECIPE = """version: 1
name: odd
description: keeps the down projection of every expert
family: glm_moe_dsa
target: int4
layout: compressed-tensors
group_size: 32
scales: search
signed_scales: true
rest: bf16
rules:
  - pattern: re:.*self_attn\\.(q_a_proj|kv_a_proj_with_mqa)$
    action: int4
  - role: routed_expert
    action: int4
engines:
  sglang: []
"""


def test_what_the_recipes_engine_refuses_is_not_made(tiny_checkpoint, tmp_path):
    """SGLang cannot load the two fused projections as INT4; vLLM can."""
    source = tiny_checkpoint().directory
    (tmp_path / "odd.yaml").write_text(RECIPE)
    command = (source, "--recipe", tmp_path / "odd.yaml")
    for name, more in (("plan", ()), ("convert", ("-o", tmp_path / "out"))):
        result = run(name, *command, *more)
        assert result.returncode == 4, result.stderr
        assert "weight_shape" in result.stderr
        assert "--allow-unservable" in result.stderr
    assert not (tmp_path / "out").exists()
    planned = document(run("plan", *command, "--json", "--allow-unservable"), "plan")
    assert planned["engines"][0]["worst"] == "refused"
    assert run("convert", *command, "-o", tmp_path / "out", "--engine", "vllm", "-q").returncode == 0
    assert run("convert", *command, "-o", tmp_path / "out2", "--allow-unservable", "-q").returncode == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--engine", "tgi"), "--engine tgi is not known"),
        (("--tp", "8"), "are of an engine"),
        (("--engine", "vllm", "--ep", "8"), "share the GPUs of --tp"),
        (("--engine", "vllm", "--backend", "pigeons"), "--backend pigeons is not known"),
    ],
)
def test_options_that_do_not_go_together(options, words, tmp_path):
    result = run("verify", tmp_path, *options)
    assert result.returncode == 2
    assert words in result.stderr


@pytest.mark.parametrize(
    ("recipe", "settings", "engines"),
    [
        ("glm-5.2", {"layout": "w4afp8"}, {"sglang"}),
        ("kimi-k2", {"layout": "w4afp8"}, {"sglang"}),
        ("glm-5.2", {"rest": "fp8-native"}, {"sglang"}),
        ("kimi-k2", {"activations": "fp8-dynamic"}, {"sglang", "vllm"}),
        ("glm-5.2", {"activations": "fp8-dynamic", "rest": "fp8"}, {"sglang", "vllm"}),
        ("glm-5.2", {"zero_points": True}, {"vllm"}),
    ],
)
def test_every_layout_of_the_real_names_loads(recipe, settings, engines):
    config = recipes_directory() / "configs" / f"{recipe}.json"
    options = RecipeOptions(recipe=recipe, **settings)
    _, plan = plan_request(PlanRequest(source=None, options=options, config=config))
    launches = [replace(launch, parallel=Parallel(tp=8)) for launch in launches_of(plan.recipe)]
    assert {launch.engine for launch in launches} == engines
    for report in check_plan(plan, launches):
        assert report.worst is Outcome.LOADS, report.rows[0]
