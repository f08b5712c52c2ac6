"""What llm-compressor leaves in memory becomes codes, or is refused."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from quantkit.calibrated import compressor
from quantkit.calibrated.compressor import FARTHEST, OneShot, gptq_words, recovered_codes
from quantkit.errors import VerificationError
from quantkit.numerics.packing import unpack_int4
from quantkit.streaming import Tokens

GROUP = 32


def left_in_memory():
    """A Linear on its grid, in BF16 as llm-compressor loads it; and its codes."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (6, 2 * GROUP), generator=generator)
    linear = torch.nn.Linear(2 * GROUP, 6, bias=False, dtype=torch.bfloat16)
    linear.weight_scale = (0.01 + torch.rand(6, 2, generator=generator)).to(torch.bfloat16)
    linear.weight.data = linear.weight_scale.repeat_interleave(GROUP, dim=1) * codes
    return torch.nn.ModuleDict({"up_proj": linear}), codes


def words_of(model, monkeypatch):
    monkeypatch.setattr(compressor, "_quantized_model", lambda *_: nullcontext(model))
    tokens = Tokens(ids_NS=np.zeros((1, 4), np.int64))
    modules = frozenset({"up_proj"})
    return dict(gptq_words(OneShot(directory=Path(), modules=modules, group_size=GROUP, signed=True, tokens=tokens)))


def test_weights_on_their_grid_give_their_codes(monkeypatch):
    model, codes = left_in_memory()
    words = words_of(model, monkeypatch)["up_proj"]
    assert torch.equal(torch.from_numpy(unpack_int4(words.packed, 2 * GROUP)), codes.to(torch.int8))


@pytest.mark.parametrize("steps", [0.04, 0.5, 20, torch.nan])
def test_a_weight_off_the_grid_is_refused_by_name(monkeypatch, steps):
    model, codes = left_in_memory()
    codes[3, 40] = 1
    linear = model["up_proj"]
    linear.weight.data[3, 40] = linear.weight_scale[3, 1] * (1 + steps)
    with pytest.raises(VerificationError, match=r"^up_proj: .* \(row 3, column 40\); give --streaming") as caught:
        words_of(model, monkeypatch)
    assert caught.value.exit_code == 4


def test_rounding_to_bf16_is_never_taken_for_an_error():
    """Every code with scales all over one binade, of BF16 and between: others differ in the exponent alone."""
    scale_RG = torch.linspace(1, 2, 1 << 16)[:, None]
    codes_RC = torch.arange(-8, 8).float().expand(len(scale_RG), -1)
    weight_RC = (codes_RC * scale_RG).to(torch.bfloat16).float()
    assert np.array_equal(recovered_codes("one", weight_RC, scale_RG, group_size=16), codes_RC.numpy())
    assert (weight_RC / scale_RG - codes_RC).abs().max() > 0.99 * FARTHEST  # no bound could be half as large
