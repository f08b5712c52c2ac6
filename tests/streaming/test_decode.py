"""Decoded weights against the specification of their codec, byte for byte."""

import numpy as np
import pytest
import torch

from quantkit.checkpoint.source import open_checkpoint
from quantkit.families import family_of
from quantkit.streaming.decode import decode_rows, decode_weight
from quantkit.transcode import read_rows
from quantkit.weights.binding import bind_weights
from quantkit.weights.source_form import source_form
from tests.tiny import write_checkpoint

FORMS = ["fp8_block", "fp8_channel", "fp8_tensor", "modelopt", "bf16", "f16", "f32"]


def weights_of(directory):
    checkpoint = open_checkpoint(directory)
    family = family_of(checkpoint.config)
    return bind_weights(checkpoint.tensors, source_form(checkpoint.quantization), family.fused_experts).weights


@pytest.mark.parametrize(("form", "fused"), [*((form, False) for form in FORMS), ("fp8_block", True), ("bf16", True)])
def test_every_weight_is_what_its_codec_decodes(tmp_path, form, fused):
    write_checkpoint(tmp_path / "source", source_format=form, fused_experts=fused, num_shards=2)
    for weight in weights_of(tmp_path / "source").values():
        rows = read_rows(weight, 0, weight.num_rows)
        expected = weight.codec.decode(rows.parts, 0).reshape(weight.shape)
        assert np.array_equal(decode_weight(weight).numpy().view(np.uint32), expected.view(np.uint32)), weight.name


def test_ragged_blocks_and_rows_in_the_middle(tmp_path):
    changes = {"intermediate_size": 200, "hidden_size": 256}
    tiny = write_checkpoint(tmp_path / "source", config_changes=changes)
    weights = weights_of(tmp_path / "source")
    for name in ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        assert torch.equal(decode_weight(weights[name]), tiny.decoded[name])
        assert torch.equal(decode_rows(weights[name], 37, 171), tiny.decoded[name][37:171])


def test_native_int4_is_code_times_scale(tmp_path):
    tiny = write_checkpoint(tmp_path / "source", model_type="kimi_k25", source_format="int4_native")
    weights = weights_of(tmp_path / "source")
    names = [name for name in tiny.decoded if ".experts." in name]
    assert len(names) == 12
    for name in names:
        assert torch.equal(decode_weight(weights[name]), tiny.decoded[name])
        assert torch.equal(decode_rows(weights[name], 3, 21), tiny.decoded[name][3:21])
