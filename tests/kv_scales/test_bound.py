"""The bound of a latent holds for whatever a norm is given, and is as tight as a norm lets it be."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantkit.errors import SourceError
from quantkit.kv_scales.bound import bound_of
from tests.kv_scales.helpers import report_of

GAIN = "model.layers.{}.self_attn.kv_a_layernorm.weight"


def normed(values, gain, *, rounds_twice):
    """An RMS norm in BF16 as transformers and engines write it."""
    x = values.to(torch.bfloat16).float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return (y.to(torch.bfloat16) * gain) if rounds_twice else (y * gain.float()).to(torch.bfloat16)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 64, 512]), st.booleans(), st.floats(1e-3, 1e4))
def test_nothing_is_beyond_the_bound(seed, channels, rounds_twice, size):
    generator = torch.Generator().manual_seed(seed)
    gain = (torch.randn(channels, generator=generator) * 3).to(torch.bfloat16)
    values = torch.randn(64, channels, generator=generator) * size
    values[0, 1:] *= 1e-4  # all in one channel, the worst there is
    values[1] = torch.nn.functional.one_hot(gain.abs().argmax(), channels) * size
    found = normed(values, gain, rounds_twice=rounds_twice).abs().max()
    assert float(found) <= bound_of(float(gain.abs().max()), channels)


def test_the_bound_is_reached_to_a_per_cent():
    """All in the channel of the largest gain."""
    gain = torch.full((512,), 2.0, dtype=torch.bfloat16)
    values = torch.zeros(1, 512)
    values[0, 7] = 1e3
    largest = float(normed(values, gain, rounds_twice=True).abs().max())
    assert largest <= bound_of(2.0, 512) <= largest * 1.015
    assert largest > np.sqrt(512) * 2.0 * (1 - 2**-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm_moe_dsa"])
def test_every_layer_has_its_bound_and_the_sign_of_a_gain_is_none_of_it(dtype, model_type, tiny_checkpoint):
    source = tiny_checkpoint(model_type=model_type, write=False, mtp=True)
    for layer, largest in ((0, 1.0), (1, -39.0), (2, 40.0)):
        gain = torch.full((128,), 0.5)
        gain[5] = largest
        source.put(GAIN.format(layer), gain.to(dtype))
    source.write()
    report = report_of(source.directory)
    assert [(one.layer, one.gain, one.is_safe) for one in report.bounds] == [
        (0, 1.0, True),
        (1, 39.0, True),  # 39 * sqrt(128) is 441.2, rounding makes it 444.7
        (2, 40.0, False),
    ]
    assert report.bounds[1].tensor == GAIN.format(1)
    assert report.bounds[1].bound == pytest.approx(39 * np.sqrt(128) * (1 + 2**-8) ** 2, rel=1e-4)


def test_rounding_decides_at_the_edge(tiny_checkpoint):
    """39.5 * sqrt(128) is 446.9: below 448, and not proven."""
    source = tiny_checkpoint(model_type="deepseek_v3", write=False)
    source.put(GAIN.format(0), torch.full((128,), 39.5))
    source.write()
    report = report_of(source.directory)
    assert [one.is_safe for one in report.bounds] == [False, True]


def test_grouped_query_attention_has_no_bound(tiny_checkpoint):
    assert report_of(tiny_checkpoint(model_type="glm4_moe").directory).bounds == ()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gain_that_is_no_number_is_refused(bad, tiny_checkpoint):
    source = tiny_checkpoint(model_type="deepseek_v3", write=False)
    source.tensor(GAIN.format(1))[3] = bad
    source.write()
    with pytest.raises(SourceError, match=r"layers\.1\.self_attn\.kv_a_layernorm\.weight: holds a NaN or an infinity"):
        report_of(source.directory)
