"""Hessians: what factors are of, how much damping they take, what is refused, how rare experts are helped."""

import numpy as np
import pytest
import torch

from quantkit.errors import SourceError
from quantkit.gptq import DAMPING, blend, factorize
from quantkit.gptq.factor import PRIOR_TOKENS
from tests.gptq.inputs import make_hessian, make_inputs

MODULE = "model.layers.3.mlp.experts.7.down_proj"


def test_the_factor_is_that_of_the_inverse_in_the_order_of_the_moments():
    hessian_CC = make_hessian(0, 96)
    factor = factorize(hessian_CC, module=MODULE)
    moments_C = np.diag(hessian_CC.numpy())
    assert (np.diff(moments_C[factor.order_C]) <= 0).all()
    damped_CC = hessian_CC.numpy() + DAMPING * moments_C.mean() * np.eye(96)
    inverse_CC = np.linalg.inv(damped_CC[np.ix_(factor.order_C, factor.order_C)])
    np.testing.assert_allclose(factor.upper_CC.T @ factor.upper_CC, inverse_CC, rtol=1e-9, atol=1e-9)
    assert np.count_nonzero(np.tril(factor.upper_CC.numpy(), -1)) == 0
    assert factor.damping == DAMPING


def test_fewer_tokens_than_channels_are_enough():
    inputs = torch.from_numpy(make_inputs(1, 3, 64))
    assert factorize(inputs.T @ inputs / 3, module=MODULE).damping == DAMPING


def test_damping_grows_tenfold_until_there_is_a_factor():
    hessian_CC = torch.eye(64, dtype=torch.float64)
    hessian_CC[:2, :2] = torch.tensor([[1.0, 1.05], [1.05, 1.0]])  # an eigenvalue of -0.05
    assert factorize(hessian_CC, module=MODULE).damping == pytest.approx(0.1)
    hessian_CC[0, 1] = hessian_CC[1, 0] = 1.5
    assert factorize(hessian_CC, module=MODULE).damping == 1.0


@pytest.mark.parametrize(("spoil", "what"), [(float("nan"), "NaN"), (float("inf"), "NaN"), (-1.0, "squares below 0")])
def test_what_is_no_hessian_is_refused_by_name(spoil, what):
    hessian_CC = make_hessian(2, 64)
    hessian_CC[5, 5] = spoil
    with pytest.raises(SourceError, match=what) as caught:
        factorize(hessian_CC, module=MODULE)
    assert caught.value.tensor == MODULE


def test_a_matrix_far_from_positive_is_refused_by_name():
    hessian_CC = torch.eye(64, dtype=torch.float64)
    hessian_CC[0, 1] = hessian_CC[1, 0] = 3.0
    with pytest.raises(SourceError, match="eigenvalues far below 0") as caught:
        factorize(hessian_CC, module=MODULE)
    assert caught.value.tensor == MODULE


def test_an_expert_counts_as_if_it_had_seen_some_tokens_of_its_layer():
    own, other = (torch.from_numpy(make_inputs(seed, 64, 32)) for seed in (0, 1))
    layer_CC = other.T @ other / 64
    as_if = (own.T @ own + PRIOR_TOKENS * layer_CC) / (64 + PRIOR_TOKENS)
    torch.testing.assert_close(blend(own.T @ own / 64, 64, layer_CC), as_if)
    torch.testing.assert_close(blend(torch.zeros_like(layer_CC), 0, layer_CC), layer_CC)
