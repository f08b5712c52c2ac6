"""An expert that saw few tokens is drawn towards its layer, and nothing depends on how loud its inputs are."""

import numpy as np
import pytest

from quantkit.numerics.shrinkage import PRIOR_TOKENS, layer_shape, shape_of, shrunk

RNG = np.random.default_rng(1)


def test_the_formula():
    own, layer = np.array([0.75, 0.25]), np.array([0.25, 0.75])
    assert shrunk(own, layer, 96).tolist() == [0.625, 0.375]  # 96 of 128
    assert shrunk(own, layer, PRIOR_TOKENS).tolist() == [0.5, 0.5]
    assert shrunk(own, layer, 0).tolist() == layer.tolist()
    made = layer_shape([(np.array([6.0, 2.0]), 1), (np.array([0.0, 4.0]), 3), (np.array([9.0, 9.0]), 0)])
    assert made is not None
    assert made.tolist() == [0.1875, 0.8125]


def test_a_loud_expert_speaks_no_louder():
    """What counts are the channels of one expert against each other: a factor on its inputs is none on its shape."""
    rows = [(np.exp(RNG.normal(size=64)), tokens) for tokens in (5, 40, 3)]
    loud = [(rows[0][0] * 2.0**20, 5), *rows[1:]]
    assert np.array_equal(layer_shape(rows), layer_shape(loud))
    layer = layer_shape(rows)
    assert np.array_equal(shrunk(shape_of(rows[0][0]), layer, 5), shrunk(shape_of(loud[0][0]), layer, 5))
    # without that, its layer would be itself
    sums = sum(moments * tokens for moments, tokens in loud)
    assert np.abs(sums / sums.sum() - shape_of(rows[0][0])).max() < 1e-4 < np.abs(layer - shape_of(rows[0][0])).max()


def test_more_tokens_are_nearer_to_the_own_shape():
    own, layer = shape_of(np.exp(RNG.normal(size=64))), shape_of(np.exp(RNG.normal(size=64)))
    distances = [np.abs(shrunk(own, layer, tokens) - own).sum() for tokens in (0, 1, 32, 1000, 10**6)]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 1e-4 * distances[0]


def test_what_saw_nothing_has_no_shape():
    assert shape_of(np.zeros(8)) is None
    assert layer_shape([(np.ones(8), 0), (np.zeros(8), 7)]) is None
    assert layer_shape([]) is None


@pytest.mark.parametrize("num_cols", [7, 64, 6144])
def test_sums_are_added_one_by_one(num_cols):
    """In pairs, as np.sum adds, they would depend on how a machine does that."""
    moments = np.exp(3 * RNG.normal(size=num_cols))
    total = 0.0
    for value in moments.tolist():
        total += value
    assert np.array_equal(shape_of(moments), moments / total)


def test_the_mean_of_a_few_tokens_is_nearer_to_the_truth_when_drawn_to_its_layer():
    """Experts whose inputs differ by a third a channel, 8 tokens each: the blend is the better estimate."""
    truth = shape_of(np.exp(RNG.normal(size=512)))
    experts = [truth * np.exp(0.33 * RNG.normal(size=512)) for _ in range(64)]
    seen = [(np.mean(RNG.normal(size=(8, 512)) ** 2, axis=0) * expert, 8) for expert in experts]
    layer = layer_shape(seen)
    own_error = drawn_error = 0.0
    for expert, (moments, tokens) in zip(experts, seen, strict=True):
        right = shape_of(expert)
        own_error += np.sum((shape_of(moments) / right - 1) ** 2)
        drawn_error += np.sum((shrunk(shape_of(moments), layer, tokens) / right - 1) ** 2)
    assert drawn_error < 0.6 * own_error
