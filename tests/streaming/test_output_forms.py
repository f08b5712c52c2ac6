"""Streaming an output in any form gives the logits of transformers with the weights that the form means."""

from types import SimpleNamespace

import pytest
import torch

from tests.classic import make_classic
from tests.convert.helpers import convert
from tests.streaming.decoded import decoded_output
from tests.streaming.models import lively_checkpoint, whole_model
from tests.streaming.test_forward import IDS, assert_equal_logits, streamed_logits

FORMS = {
    "int4": {},
    "int4, one sign, groups of 128": {"group_size": 128, "signed_scales": False},
    "zero points": {"zero_points": True},
    "rest in fp8": {"rest": "fp8"},
    "rest in native fp8": {"rest": "fp8-native", "engine": "sglang"},
    "w4afp8": {"layout": "w4afp8"},
}


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_what_convert_writes(tmp_path, form):
    source = lively_checkpoint(tmp_path / "source", "glm_moe_dsa")
    convert(source.directory, tmp_path / "out", **FORMS[form])
    meant = SimpleNamespace(config=source.config, decoded=decoded_output(tmp_path / "out"))
    expected = whole_model(meant, "glm_moe_dsa")(IDS).logits
    # float32 sums in another order: a few steps of 2**-24 a layer
    assert_equal_logits(expected, streamed_logits(tmp_path / "out"), rel_rms=2e-5)
    assert (expected - whole_model(source, "glm_moe_dsa")(IDS).logits).std() / expected.std() > 1e-4  # not the source


@torch.no_grad()
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq", "auto_round:auto_gptq", "auto_round:auto_awq"])
def test_what_other_tools_write(tmp_path, layout, symmetric):
    source = lively_checkpoint(tmp_path / "source", "glm4_moe", source_format="bf16")
    for module, (unsigned, scale, zero) in make_classic(source, layout, symmetric=symmetric).items():
        wide = [one.float().repeat_interleave(32, 1) for one in (scale, zero)]
        source.decoded[f"{module}.weight"] = (unsigned - wide[1]) * wide[0]
    expected = whole_model(source, "glm4_moe")(IDS).logits
    assert_equal_logits(expected, streamed_logits(source.directory), rel_rms=2e-5)
