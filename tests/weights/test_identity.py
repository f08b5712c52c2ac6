"""By what a model is known: the same in all its forms, another where any part of it was trained further."""

import pytest
import torch

from quantkit.checkpoint.source import open_checkpoint
from quantkit.families import family_of
from quantkit.weights.binding import bind_weights
from quantkit.weights.identity import model_fingerprint
from quantkit.weights.source_form import source_form
from tests.convert.helpers import convert
from tests.tiny import write_checkpoint

LAYER = "model.layers.1"


def known_by(directory):
    checkpoint = open_checkpoint(directory)
    family = family_of(checkpoint.config)
    binding = bind_weights(checkpoint.tensors, source_form(checkpoint.quantization), family.fused_experts)
    return model_fingerprint(binding, family, checkpoint.config)


@pytest.mark.parametrize("source_format", ["fp8_block", "bf16"])
@pytest.mark.parametrize(
    ("name", "what"),
    [
        (f"{LAYER}.self_attn.o_proj.weight", "attention"),
        (f"{LAYER}.mlp.experts.1.down_proj.weight", "routed_expert"),
        (f"{LAYER}.mlp.shared_experts.up_proj.weight", "shared_expert"),
        ("model.layers.0.mlp.gate_proj.weight", "dense_mlp"),
        (f"{LAYER}.mlp.gate.weight", "router"),
        ("model.embed_tokens.weight", "embedding"),
        ("lm_head.weight", "head"),
    ],
)
def test_weights_that_were_trained_further_under_the_same_norms_are_another_model(source_format, name, what, tmp_path):
    tiny = write_checkpoint(tmp_path / "source", source_format=source_format)
    before = known_by(tmp_path / "source")
    stored = tiny.tensor(name)
    tiny.put(name, stored.view(torch.uint8).flip(0).view(stored.dtype))
    tiny.write()
    assert before.difference(known_by(tmp_path / "source")) == f"weights of {what}"


@pytest.mark.parametrize("source_format", ["fp8_block", "bf16"])
@pytest.mark.parametrize("rest", ["bf16", "fp8"])
def test_an_output_is_the_model_that_it_was_made_of(source_format, rest, tmp_path):
    write_checkpoint(tmp_path / "source", source_format=source_format)
    if (source_format, rest) == ("bf16", "fp8"):
        rest = "bf16"
    convert(tmp_path / "source", tmp_path / "out", rest=rest)
    source, output = known_by(tmp_path / "source"), known_by(tmp_path / "out")
    assert source.difference(output) is None
    shared = {key.partition("/")[0] for key in source.samples.keys() & output.samples.keys()}
    assert {"router", "router_bias", "embedding", "head"} <= shared
    assert ("attention" in shared) == (rest == "fp8")


def test_two_formats_of_one_revision_are_one_model(tmp_path):
    """Their norms, routers and embeddings are the same; FP8 codes and BF16 values are not compared."""
    for name in ("fp8_block", "bf16"):
        write_checkpoint(tmp_path / name, source_format=name)
    one, other = known_by(tmp_path / "fp8_block"), known_by(tmp_path / "bf16")
    assert one.difference(other) is None
    assert {"attention/fp8-128x128"} <= one.samples.keys() - other.samples.keys()
