"""The model card: what the hub reads, what people read, and that a finished output tells it again word for word."""

import json

import pytest
import yaml

from quantkit.convert.card import read_card
from quantkit.convert.conversion import Conversion
from quantkit.convert.convert import convert_checkpoint
from quantkit.convert.manifest import license_of, memory_document
from quantkit.engines.parallel import Parallel
from quantkit.errors import VerificationError
from quantkit.memory.gpus import gpu_named
from quantkit.memory.kv_format import KvDtype
from quantkit.memory.make import make_memory_plan
from quantkit.memory.resolve import resolve_model
from quantkit.memory.serving import MemoryRequest
from quantkit.plan.make import make_plan
from quantkit.recipe import builtin_recipe
from quantkit.sources import resolve_source
from scripts.make_checkpoint import SMALL, glm_config, make_checkpoint
from tests.convert.plans import plan_of
from tests.tiny import MODEL_TYPES

PROVENANCE = {"hub_id": "zai-org/GLM-5.2-FP8", "commit": "0123456789abcdef0123456789abcdef01234567"}


def made(plan, target, provenance=None):
    convert_checkpoint(Conversion(plan=plan, target=target, num_jobs=2, provenance=provenance or {}))
    return (target / "README.md").read_text()


def front_matter(card):
    assert card.startswith("---\n")
    return yaml.safe_load(card.split("---\n")[1])


@pytest.fixture
def splittable(tmp_path):
    """A source that eight GPUs can share."""
    config = glm_config(SMALL, experts=8, layers=4, dense_layers=1, mtp=True)
    make_checkpoint(tmp_path / "source", config, num_shards=3)
    return tmp_path / "source"


@pytest.mark.parametrize("model_type", [*MODEL_TYPES, "kimi_k25"])
@pytest.mark.parametrize("source_format", ["fp8_block", "bf16", "f16"])
def test_a_finished_output_tells_its_card_again(model_type, source_format, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type=model_type, source_format=source_format).directory
    card = made(plan_of(source), tmp_path / "out")
    assert read_card(tmp_path / "out") == card
    assert card.endswith("\n")
    assert str(tmp_path) not in card


def test_an_unknown_family_has_a_card(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(write=False)
    source.config["model_type"] = "something_new"
    source.write()
    card = made(plan_of(source.directory), tmp_path / "out")
    assert read_card(tmp_path / "out") == card
    assert "--tp-size 4" in card or "--tp-size 8" in card


def test_the_hub_is_told_where_a_model_comes_from(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    (source / "README.md").write_text("---\nlicense: other\nlicense_name: 'no'\nlicense_link: LICENSE\n---\n# GLM\n")
    card = made(plan_of(source), tmp_path / "out", PROVENANCE)
    assert front_matter(card) == {
        "base_model": PROVENANCE["hub_id"],
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "license": "other",
        "license_name": "no",
        "license_link": "LICENSE",
        "tags": ["compressed-tensors", "int4", "quantkit"],
    }
    assert f"/tree/{PROVENANCE['commit']}" in card
    assert read_card(tmp_path / "out") == card


def test_of_a_directory_nothing_is_said_that_nobody_knows(tiny_checkpoint, tmp_path):
    card = made(plan_of(tiny_checkpoint().directory), tmp_path / "out")
    assert front_matter(card).keys() == {"library_name", "tags"}
    assert "# INT4 of a local checkpoint" in card


@pytest.mark.parametrize(
    ("text", "license"),
    [
        ("---\nlicense: mit\n---\n", {"license": "mit"}),
        ("\ufeff---\r\nlicense: mit\r\n---\r\n", {"license": "mit"}),
        ("---\nlicense: [mit, apache-2.0]\n---\n", {"license": ["mit", "apache-2.0"]}),
        ("---\nlicense: no\n---\n", {}),
        ("---\nlicense: 2026-02-31\n---\n", {}),
        ('---\nlicense: "a\\nb"\n---\n', {}),
        ("---\nlicense: {a: b}\n---\n", {}),
        ("---\nlicense: [mit, 3]\n---\n", {}),
        ("---\nlicense: []\n---\n", {}),
        (f"---\nlicense: {'x' * 300}\n---\n", {}),
        ("---\nlicense: &a [*a]\n---\n", {}),
        ("---\nx: &x {a: b}\nlicense: mit\ny: {<<: [*x, *x]}\n---\n", {}),
        ("---\nlicense: !!python/object/apply:os.system [true]\n---\n", {}),
        ("---\n- license\n---\n", {}),
        ("---\n: : :\n---\n", {}),
        ("---\nlicense: mit\n", {}),
        ("# license: mit\n", {}),
        ("---\n" + "[" * 5000 + "\n---\n", {}),
        ("", {}),
    ],
)
def test_a_license_is_what_the_sources_card_states(text, license, tmp_path):
    (tmp_path / "README.md").write_bytes(text.encode())
    assert license_of(tmp_path / "README.md") == license
    assert license_of(tmp_path / "nothing.md") == {}


def test_memory_is_what_memory_plan_says(splittable, tmp_path):
    card = made(plan_of(splittable), tmp_path / "out")
    document = memory_document(tmp_path / "out", ())
    model = resolve_model(str(tmp_path / "out"))
    for row in document["kv_cache"]:
        dtype = KvDtype(row["dtype"])
        request = MemoryRequest(gpu=gpu_named("h200"), parallel=Parallel(tp=8), kv_dtype=dtype, context=131_072)
        plan = make_memory_plan(model, request)
        assert row["bytes_per_token"] == plan.tightest.cell.num_bytes
        assert row["tokens"] == list(plan.num_tokens)
        assert document["weights_bytes_per_gpu"] == plan.tightest.weights.num_bytes
        assert f"| {row['bytes_per_token']:,} | {plan.num_tokens.mid:,} |" in card
    assert [row["dtype"] for row in document["kv_cache"]] == ["bf16", "fp8"]
    assert document == json.loads((tmp_path / "out" / "conversion.json").read_text())["memory_plan"]


def test_what_eight_gpus_cannot_share_has_no_memory_plan_and_a_smaller_launch_line(tiny_checkpoint, tmp_path):
    card = made(plan_of(tiny_checkpoint().directory), tmp_path / "out")
    assert "There is no memory plan at TP8: sglang cannot split this checkpoint" in card
    assert "4 attention heads do not divide by 8" in card
    assert "--tp-size 4\n" in card
    assert "--tensor-parallel-size 4\n" in card


def with_recipe(source, name, **changes):
    resolved = resolve_source(str(source), recipe=name)
    recipe = resolved.recipe.model_copy(update=changes)
    return make_plan(recipe, resolved.family, resolved.checkpoint)


def test_launch_lines_are_the_recipes(tiny_checkpoint, tmp_path):
    card = made(with_recipe(tiny_checkpoint().directory, "glm-5.2"), tmp_path / "out")
    recipe = builtin_recipe("glm-5.2")
    for command, engine in (("python -m sglang.launch_server --model-path", "sglang"), ("vllm serve", "vllm")):
        assert f"```sh\n{command} MODEL {recipe.engines[engine][0]}\n```" in card
        for note in recipe.engines[engine][1:]:
            assert f"- {note}" in card
    assert read_card(tmp_path / "out") == card


@pytest.mark.parametrize(
    ("advice", "line", "is_noted"),
    [
        ("--tp-size 8; TP 16 needs more", "--tp-size 8", True),
        ("--tp-size 8 or 16", "--tp-size 8", True),
        ("--tp-size 8 --kv-cache-dtype fp8_e4m3", "--tp-size 8 --kv-cache-dtype fp8_e4m3", False),
        ("INT8 activations must stay off", "--tp-size 4", True),
    ],
)
def test_of_advice_in_words_only_the_options_are_a_command(advice, line, is_noted, tiny_checkpoint, tmp_path):
    plan = with_recipe(tiny_checkpoint().directory, "glm-5.2", engines={"sglang": (advice,)})
    card = made(plan, tmp_path / "out")
    assert f"--model-path MODEL {line}\n```" in card
    assert (f"- {advice}" in card) == is_noted
    assert "vllm serve" not in card


def test_native_int4_and_nothing_at_all_are_called_so(tiny_checkpoint, tmp_path):
    native = tiny_checkpoint(model_type="kimi_k2", source_format="int4_native").directory
    card = made(plan_of(native), tmp_path / "native")
    assert "codes and scales are copied bit for bit" in card
    assert "## Error" not in card
    resolved = resolve_source(str(tiny_checkpoint("plain", source_format="bf16").directory))
    recipe = resolved.recipe.model_copy(update={"rules": ()})
    card = made(make_plan(recipe, resolved.family, resolved.checkpoint), tmp_path / "plain-out", PROVENANCE)
    assert front_matter(card) == {
        "base_model": PROVENANCE["hub_id"],
        "library_name": "transformers",
        "tags": ["quantkit"],
    }
    assert "# Copy of" in card
    assert "Nothing is quantized." in card


def test_what_is_no_text_in_names_is_spelled_out(tiny_checkpoint, tmp_path):
    import torch

    source = tiny_checkpoint(write=False)
    source.put("model.\x1b[31m", torch.zeros(3))
    source.write()
    card = made(plan_of(source.directory), tmp_path / "out")
    assert "\x1b" not in card
    assert "\\u001b[31m" in card


@pytest.mark.parametrize(
    "damage",
    [
        lambda manifest: manifest.pop("memory_plan"),
        lambda manifest: manifest.pop("errors"),
        lambda manifest: manifest["source"].pop("license"),
        lambda manifest: manifest["parts"].append({}),
        lambda manifest: manifest["parts"][0].update(source="unheard"),
        lambda manifest: manifest["parts"][0].update(source_bytes="many"),
        lambda manifest: manifest.update(family="unheard"),
        lambda manifest: manifest.update(warnings=None),
        lambda manifest: manifest["memory_plan"].pop("reason"),
        lambda manifest: manifest.update(tool="x"),
    ],
)
def test_a_damaged_manifest_is_named(damage, tiny_checkpoint, tmp_path):
    made(plan_of(tiny_checkpoint().directory), tmp_path / "out")
    path = tmp_path / "out" / "conversion.json"
    manifest = json.loads(path.read_text())
    damage(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(VerificationError) as caught:
        read_card(tmp_path / "out")
    assert "conversion.json" in str(caught.value) or "unheard" in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize("content", [None, b"{", b"[]", b'{"model_type": "glm_moe_dsa", "num_attention_heads": "x"}'])
def test_a_damaged_config_is_named(content, tiny_checkpoint, tmp_path):
    made(plan_of(tiny_checkpoint().directory), tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(VerificationError, match=r"config\.json"):
        read_card(tmp_path / "out")
