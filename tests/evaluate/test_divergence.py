"""Sums over blocks of the vocabulary are the definitions over the whole of it."""

import numpy as np
import pytest
import torch

from quantkit.evaluate.divergence import Divergences

NUM_PREDICTIONS, VOCABULARY = 37, 101


def logits(seed, *, spread=4.0, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_PREDICTIONS, VOCABULARY, generator=generator) * spread + shift


def following(seed=9):
    return torch.randint(0, VOCABULARY, (NUM_PREDICTIONS,), generator=torch.Generator().manual_seed(seed))


def divided(source, output, next_P, *, rows, columns):
    divergences = Divergences(next_P)
    for first in range(0, source.shape[1], columns):
        for begin in range(0, len(source), rows):
            part = slice(begin, min(begin + rows, len(source)))
            divergences.add(part, first, source[part, first : first + columns], output[part, first : first + columns])
    return divergences.finish()


def assert_by_definition(found, source, output, next_P):
    log_p, log_q = (torch.log_softmax(one.double(), -1) for one in (source, output))
    at = torch.arange(len(next_P))
    top = source.argmax(-1)
    expected = {
        "kl": (log_p.exp() * (log_p - log_q)).sum(-1),
        "source_nll": -log_p[at, next_P],
        "output_nll": -log_q[at, next_P],
        "top_shift": log_q.exp()[at, top] - log_p.exp()[at, top],
    }
    for name, values in expected.items():
        # float64: some 100 terms of at most 100
        np.testing.assert_allclose(getattr(found, name), values.numpy(), rtol=1e-11, atol=1e-13, err_msg=name)
    assert np.array_equal(found.same_top, (top == output.argmax(-1)).numpy())


@pytest.mark.parametrize(("rows", "columns"), [(37, 101), (37, 1), (5, 8), (1, 101), (36, 100)])
def test_any_blocks_give_the_definition(rows, columns):
    source, next_P = logits(1), following()
    output = source + 0.3 * logits(2)
    found = divided(source, output, next_P, rows=rows, columns=columns)
    assert_by_definition(found, source, output, next_P)
    assert 0.1 < found.same_top.mean() < 1  # it says something


def test_large_logits_do_not_overflow():
    source, output, next_P = logits(1, spread=300, shift=2e4), logits(2, spread=300, shift=-2e4), following()
    assert_by_definition(divided(source, output, next_P, rows=8, columns=7), source, output, next_P)


def test_the_same_logits_are_exactly_no_divergence():
    source, next_P = logits(3, spread=9), following()
    found = divided(source, source.clone(), next_P, rows=10, columns=13)
    assert (found.kl == 0).all()
    assert (found.top_shift == 0).all()
    assert found.same_top.all()
    assert np.array_equal(found.source_nll, found.output_nll)


def test_a_constant_added_to_all_logits_is_hardly_a_divergence_and_never_below_zero():
    source, next_P = logits(4).double(), following()
    found = divided(source, source + 5.0, next_P, rows=37, columns=17)
    assert (found.kl >= 0).all()
    assert found.kl.max() < 1e-13


def test_of_equal_logits_the_first_is_the_likeliest_in_whatever_blocks():
    source = torch.zeros(2, 8)
    source[:, 3] = source[:, 6] = 1.0
    output = torch.zeros(2, 8)
    output[0, 3] = output[0, 6] = 1.0
    output[1, 6] = 1.0
    for columns in (8, 4, 1):
        found = divided(source, output, torch.tensor([0, 7]), rows=2, columns=columns)
        assert found.same_top.tolist() == [True, False]
        assert_by_definition(found, source, output, torch.tensor([0, 7]))
