"""Streaming a checkpoint gives what transformers' own forward gives over the whole model."""

import pytest
import torch

from quantkit.checkpoint.source import open_checkpoint
from quantkit.families import family_of
from quantkit.streaming import open_model, open_states
from tests.streaming.models import CLASSES, lively_checkpoint, whole_model

IDS = torch.randint(0, 128, (5, 24), generator=torch.Generator().manual_seed(0))


def streamed_logits(directory, ids=IDS, *, work=None, dtype=torch.float32):
    checkpoint = open_checkpoint(directory)
    model = open_model(checkpoint, family_of(checkpoint.config), dtype=dtype)
    states = open_states(*ids.shape, model.hidden_size, dtype=dtype, directory=work)
    states.hidden[:] = model.embed(ids.reshape(-1))
    for index in range(model.num_layers):
        model.layer(index).run(states)
    return model.logits(states.hidden).view(*ids.shape, -1)


def assert_equal_logits(expected, got, *, rel_rms):
    error = (expected - got).pow(2).mean().sqrt() / expected.std()
    assert error < rel_rms, f"{error} is above {rel_rms}"
    assert expected.std() > 0.01  # it says something


@pytest.mark.parametrize("model_type", sorted(CLASSES))
def test_logits_equal_those_of_the_whole_model(tmp_path, model_type):
    tiny = lively_checkpoint(tmp_path / "source", model_type)
    with torch.no_grad():
        expected = whole_model(tiny, model_type)(IDS).logits
    # float32 sums in another order: a few steps of 2**-24 a layer
    assert_equal_logits(expected, streamed_logits(tmp_path / "source"), rel_rms=2e-5)
