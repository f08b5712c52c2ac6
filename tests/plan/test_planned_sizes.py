"""Planned sizes from public configs alone, against published and computed figures."""

from functools import cache
from pathlib import Path

import pytest

from quantkit.families import family_of
from quantkit.plan.make import make_plan
from quantkit.recipe import builtin_recipe, default_recipe, override
from quantkit.weights.from_config import assumed_checkpoint
from tests.published import published_config

GIB = 2**30


@cache
def plan(config: str, recipe: str, group_size: int = 32):
    """``recipe``: a shipped one, or "default"."""
    checkpoint = assumed_checkpoint(published_config(config), Path("config.json"))
    family = family_of(checkpoint.config)
    chosen = default_recipe(family.name, has_experts=True) if recipe == "default" else builtin_recipe(recipe)
    return make_plan(override(chosen, group_size=group_size), family, checkpoint)


@pytest.mark.parametrize(
    ("config", "recipe", "num_tensors", "source_gib"),
    [
        ("glm-5.2", "glm-5.2", 118_629, 703.72),
        ("glm-5", "glm-5", 119_028, 704.23),
        ("kimi-k2", "kimi-k2", 139_583, 958.49),
        ("kimi-k2-thinking", "kimi-k2-thinking", 208_215, 553.40),
        ("glm-4.5", "glm-4.5", 44_691, 667.46),
        ("qwen3-235b-a22b", "default", 36_945, 437.90),
        ("qwen3-235b-a22b-fp8", "default", 73_417, 220.21),
    ],
)
def test_source_of_a_config(config, recipe, num_tensors, source_gib):
    checkpoint = plan(config, recipe).checkpoint
    assert len(checkpoint.tensors) == num_tensors
    assert checkpoint.num_bytes / GIB == pytest.approx(source_gib, abs=0.01)


@pytest.mark.parametrize(
    ("config", "recipe", "group_size", "num_tensors", "output_gib"),
    [
        # published by those who serve it: 421
        ("glm-5.2", "glm-5.2", 32, 176_321, 419.94),
        # 724.8 + 9.66 B expert weights: half a GiB less for each 1/32 byte of scales saved
        ("glm-5.2", "glm-5.2", 128, 176_321, 387.92),
        ("kimi-k2-thinking", "kimi-k2-thinking", 32, 208_215, 553.40),
        # 227.10 B expert weights at 4.5 bits and 8.00 B at 16; two tensors more for each of 36,096
        ("qwen3-235b-a22b", "default", 32, 109_137, 133.86),
        ("qwen3-235b-a22b-fp8", "default", 32, 109_137, 133.86),
    ],
)
def test_output_of_a_config(config, recipe, group_size, num_tensors, output_gib):
    made = plan(config, recipe, group_size=group_size)
    assert made.num_tensors == num_tensors
    assert made.tensor_bytes / GIB == pytest.approx(output_gib, rel=0.001)


def test_native_int4_stays_what_it_is():
    made = plan("kimi-k2-thinking", "kimi-k2-thinking")
    assert made.tensor_bytes == made.checkpoint.num_bytes
    assert made.config == made.checkpoint.config


def test_parts_add_up_to_the_whole():
    made = plan("glm-5.2", "glm-5.2")
    parts = made.parts
    assert sum(part.output_bytes for part in parts) == made.tensor_bytes
    assert sum(part.source_bytes for part in parts) == made.checkpoint.num_bytes
    experts = next(part for part in parts if part.action == "int4")
    assert experts.num_weights == 76 * 256 * 3  # 75 layers and the MTP layer
