"""Recipes: strict on reading, first rule wins, never a protected module."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit import recipe_files
from quantkit.errors import RecipeError
from quantkit.families import FAMILIES, NEVER_QUANTIZED, Role
from quantkit.recipe import (
    Rule,
    builtin_names,
    builtin_recipe,
    decide,
    default_recipe,
    load_recipe,
    override,
    recipe_document,
    recipes_directory,
)

NAMES = (
    *("glm-4.5", "glm-4.6", "glm-4.7", "glm-5", "glm-5.1", "glm-5.2", "glm-5.3"),
    *("kimi-k2", "kimi-k2-0905", "kimi-k2-thinking", "kimi-k2.5", "kimi-k2.6"),
)
TEXT = """\
version: 1
name: mine
description: a test
source:
  hub_id: org/model
family: glm_moe_dsa
target: int4
layout: compressed-tensors
group_size: 32
scales: search
signed_scales: true
rest: bf16
rules:
  - role: routed_expert
    action: int4
"""
EXPERT = "model.layers.3.mlp.experts.0.up_proj"


def load(tmp_path: Path, text: str):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return load_recipe(path)


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, text)
    assert caught.value.exit_code == 2
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_the_shipped_recipes_are_these():
    assert builtin_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_is_complete(name):
    recipe = builtin_recipe(name)
    assert recipe.name == name
    assert recipe.source is not None
    assert recipe.family in FAMILIES
    assert recipe.group_size == 32
    assert set(recipe.engines) == {"sglang", "vllm"}
    assert all(recipe.engines.values())
    assert decide(recipe.rules, EXPERT, Role.ROUTED_EXPERT) == ("int4", 0)
    assert all(decide(recipe.rules, "x", role) == ("keep", None) for role in Role if role is not Role.ROUTED_EXPERT)


def test_glm_4_recipes_read_the_bf16_repositories():
    for name in ("glm-4.5", "glm-4.6", "glm-4.7"):
        assert builtin_recipe(name).source.hub_id == f"zai-org/{name.upper()}"


def test_an_unknown_recipe_suggests_a_near_name():
    with pytest.raises(RecipeError, match=r"unknown recipe 'glm5\.2'; did you mean 'glm-5\.2'\?"):
        builtin_recipe("glm5.2")


def test_summaries_agree_with_the_recipes():
    for summary in recipe_files.recipe_summaries():
        recipe = builtin_recipe(summary.name)
        assert (summary.family, summary.group_size, summary.target) == (
            recipe.family,
            recipe.group_size,
            "int4",
        )
        assert summary.hub_id == recipe.source.hub_id
        assert summary.description
    assert tuple(summary.name for summary in recipe_files.recipe_summaries()) == NAMES


def test_a_wheel_reads_its_own_copy(tmp_path, monkeypatch):
    assert recipes_directory().name == "recipes"
    monkeypatch.setattr(recipe_files, "_PACKAGE", tmp_path)
    assert recipes_directory() == tmp_path.parent / "recipes"
    (tmp_path / "_recipes").mkdir()
    assert recipes_directory() == tmp_path / "_recipes"


def test_a_document_reads_back_as_the_same_recipe(tmp_path):
    recipe = builtin_recipe("glm-5.2")
    changed = override(recipe, group_size=64, targets=("re:.*experts.*",), ignore=("lm_head",))
    for each in (recipe, changed, default_recipe("generic", has_experts=True)):
        document = recipe_document(each)
        path = tmp_path / "again.yaml"
        path.write_text(json.dumps(document))
        assert load_recipe(path) == each


def test_the_plain_text_loads(tmp_path):
    recipe = load(tmp_path, TEXT)
    assert recipe.source.revision == "main"
    assert recipe.engines == {}
    with pytest.raises(ValueError, match="frozen"):
        recipe.group_size = 64


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("group_size: 32", "groupsize: 32", "mine.yaml: groupsize: unknown key; did you mean 'group_size'?"),
        ("role: routed_expert", "rol: routed_expert", "rules.0.rol: unknown key; did you mean 'role'?"),
        ("  hub_id: org/model", "  hub: org/model", "source.hub: unknown key; did you mean 'hub_id'?"),
        ("group_size: 32\n", "", "group_size: is missing"),
        ("group_size: 32", "group_size: 48", "group_size: input should be 32, 64 or 128"),
        # YAML reads an octal number
        ("group_size: 32", "group_size: 032", "group_size: input should be 32, 64 or 128"),
        ("group_size: 32", "group_size: '32'", "group_size: input should be 32, 64 or 128"),
        ("version: 1", "version: true", "version: true is not a number"),
        ("version: 1", "version: 2", "version: input should be 1"),
        ("name: mine", "name: 5.10", "name: input should be a valid string"),
        ("signed_scales: true", "signed_scales: 1", "signed_scales: input should be a valid boolean"),
        ("scales: search", "scales: mse", "scales: input should be 'search' or 'absmax'"),
        (
            "family: glm_moe_dsa",
            "family: glm_moe_dza",
            "unknown model family 'glm_moe_dza'; did you mean 'glm_moe_dsa'",
        ),
        ("role: routed_expert", "role: expert", "rules.0.role: input should be"),
        ("role: routed_expert", "pattern: re:(", "rules.0: 're:(' is no regular expression"),
        (
            "  - role: routed_expert\n    action: int4",
            "  - action: int4",
            "rules.0: needs either role or pattern",
        ),
        ("role: routed_expert", "role: norm\n    pattern: x", "rules.0: needs either role or pattern"),
        ("role: routed_expert", "role: router", "rules.0: router is never INT4"),
        (
            "scales: search",
            "scales: search\nscales: absmax",
            "mine.yaml:11: key 'scales' stands here and in line 10",
        ),
        ("name: mine", "name: [", "correct the YAML"),
        ("name: mine", "name: !!python/object:os.system x", "mine.yaml:2: "),
    ],
)
def test_a_wrong_recipe_is_one_line_with_its_place(tmp_path, old, new, message):
    assert TEXT.count(old) == 1
    assert message in refusal(tmp_path, TEXT.replace(old, new))


@pytest.mark.parametrize("text", ["", "- a", "just text", "? [a, b]\n: 1", "a: &x [*x]", "no: 1", "!!binary aGk=: 1"])
def test_what_is_no_recipe_at_all_is_refused(tmp_path, text):
    assert refusal(tmp_path, text).startswith("mine.yaml")


def test_an_unreadable_file_is_a_recipe_error(tmp_path):
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path / "absent.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path / "bytes.yaml")


def test_the_first_rule_that_hits_wins():
    rules = (
        Rule(pattern=EXPERT, action="keep"),
        Rule(pattern=r"re:.*experts\.1\.", action="int4"),
        Rule(role=Role.ROUTED_EXPERT, action="int4"),
    )
    assert decide(rules, EXPERT, Role.ROUTED_EXPERT) == ("keep", 0)
    assert decide(rules, EXPERT.replace("experts.0", "experts.1"), Role.ROUTED_EXPERT) == ("int4", 1)
    assert decide(rules, EXPERT.replace("experts.0", "experts.2"), Role.ROUTED_EXPERT) == ("int4", 2)
    assert decide(rules, "model.layers.3.self_attn.o_proj", Role.ATTENTION) == ("keep", None)


def test_patterns_match_from_the_start_and_need_not_reach_the_end():
    def is_hit(pattern: str) -> bool:
        return decide((Rule(pattern=pattern, action="int4"),), EXPERT, Role.ROUTED_EXPERT)[0] == "int4"

    assert is_hit(r"re:model\.layers")
    assert is_hit(r"re:.*up_proj$")
    assert not is_hit(r"re:mlp\.experts")
    assert not is_hit("model.layers.3.mlp")
    assert not is_hit("up_proj")
    assert not is_hit(EXPERT.replace(".", "x"))


@pytest.mark.parametrize("role", sorted(NEVER_QUANTIZED))
def test_a_pattern_never_quantizes_a_protected_module(role):
    rules = (Rule(pattern="re:.*", action="int4"),)
    with pytest.raises(RecipeError, match=rf"the .* would quantize model\.x, which is a {role}"):
        decide(rules, "model.x", role)
    kept = (Rule(pattern="model.x", action="keep"), *rules)
    assert decide(kept, "model.x", role) == ("keep", 0)


def test_overrides_replace_targets_and_put_ignore_first():
    recipe = builtin_recipe("glm-5.2")
    ignored = override(recipe, ignore=("re:.*layers\\.78\\..*",), scales="absmax", signed_scales=False)
    assert [str(rule) for rule in ignored.rules] == [r"pattern re:.*layers\.78\..*", "role routed_expert"]
    assert (ignored.scales, ignored.signed_scales, ignored.group_size) == ("absmax", False, 32)
    targeted = override(recipe, targets=("re:.*o_proj",), ignore=("a",), group_size=128)
    assert [(str(rule), rule.action) for rule in targeted.rules] == [
        ("pattern a", "keep"),
        ("pattern re:.*o_proj", "int4"),
    ]
    assert targeted.group_size == 128
    assert override(recipe) == recipe


@pytest.mark.parametrize("change", [{"group_size": 48}, {"scales": "mse"}, {"targets": ("re:(",)}])
def test_overrides_are_checked_under_their_own_names(change):
    with pytest.raises(RecipeError, match=r"is not there|no regular expression"):
        override(builtin_recipe("glm-5.2"), **change)


def test_default_recipes_take_experts_or_else_every_layer_matrix():
    moe = default_recipe("generic", has_experts=True)
    assert [rule.role for rule in moe.rules] == [Role.ROUTED_EXPERT]
    dense = default_recipe("generic", has_experts=False)
    assert decide(dense.rules, "model.layers.0.self_attn.q_proj", Role.LINEAR)[0] == "int4"
    assert moe.source is None
    with pytest.raises(RecipeError, match="unknown model family"):
        default_recipe("no_such", has_experts=True)


def test_reading_recipes_and_families_loads_nothing_heavy():
    code = (
        "import sys; import quantkit.recipe_files as f; f.recipe_summaries(); light = set(sys.modules);"
        "import quantkit.recipe, quantkit.engines.fusion, quantkit.engines.tensor_parallel;"
        "heavy = {'torch', 'numpy', 'transformers', 'numba'};"
        "print(sorted((heavy | {'pydantic'}) & light), sorted(heavy & set(sys.modules)))"
    )
    root = Path(recipe_files.__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[] []"
