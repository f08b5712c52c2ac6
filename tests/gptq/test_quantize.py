"""GPTQ against the textbook, written here anew, against llm-compressor's own, and against what it promises."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from quantkit.gptq import Factor, factorize, quantize_gptq
from quantkit.gptq.quantize import look_again, round_with_feedback
from quantkit.numerics import bfloat16, grid, search
from quantkit.numerics.absmax import quantize_absmax
from tests.gptq.inputs import make_hessian, make_inputs, make_weight

SEEDS = range(6)


def factor_of(hessian_CC: torch.Tensor) -> Factor:
    factor = factorize(hessian_CC, module="model.layers.0.mlp.up_proj")
    assert factor is not None
    return factor


def widened(scale_RG: np.ndarray, group_size: int) -> np.ndarray:
    return np.repeat(bfloat16.to_float32(scale_RG).astype(np.float64), group_size, axis=1)


def output_error2(weight_RC: np.ndarray, decoded_RC: np.ndarray, hessian_CC: torch.Tensor) -> float:
    difference_RC = weight_RC.astype(np.float64) - decoded_RC
    return float(np.einsum("rc,cd,rd->", difference_RC, hessian_CC.numpy(), difference_RC))


def brain_surgeon(weight_RC: np.ndarray, scale_RC: np.ndarray, hessian_CC: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Optimal brain quantization: a column leaves the explicit inverse, its error goes to the others."""
    weight_RC, inverse_CC = weight_RC.astype(np.float64), np.linalg.inv(hessian_CC)
    codes_RC = np.zeros(weight_RC.shape)
    for column in order:
        codes_RC[:, column] = np.clip(np.rint(weight_RC[:, column] / scale_RC[:, column]), -8, 7)
        error_R = weight_RC[:, column] - codes_RC[:, column] * scale_RC[:, column]
        pivot = inverse_CC[column, column]
        weight_RC = weight_RC - np.outer(error_R / pivot, inverse_CC[column])
        inverse_CC = inverse_CC - np.outer(inverse_CC[:, column], inverse_CC[column]) / pivot
    return codes_RC


@pytest.mark.parametrize("seed", SEEDS)
def test_feedback_is_optimal_brain_quantization_column_by_column(seed):
    weight_RC, hessian_CC = make_weight(seed, 12, 160), make_hessian(seed, 160)  # more than one block
    factor = factor_of(hessian_CC)
    _, scale_RG = quantize_absmax(bfloat16.from_float32(weight_RC), group_size=32)
    scale_RC, order = widened(scale_RG, 32), factor.order_C.numpy()
    damped_CC = hessian_CC.numpy() + np.eye(160) * factor.damping * np.diag(hessian_CC.numpy()).mean()
    expected_RC = brain_surgeon(weight_RC, scale_RC, damped_CC, order)
    turned = [torch.from_numpy(array.astype(np.float64)).T[factor.order_C] for array in (weight_RC, scale_RC)]
    codes_CR = round_with_feedback(*turned, factor.upper_CC)
    np.testing.assert_array_equal(codes_CR.T.numpy(), expected_RC[:, order])


@pytest.mark.parametrize("group_size", [32, 128])
def test_error_is_below_that_of_llm_compressor_with_the_same_hessian(group_size):
    ours, theirs = [], []
    for seed in SEEDS:
        weight_RC, hessian_CC = make_weight(seed, 64, 256), make_hessian(seed, 256)
        decoded_RC, scale_RG = compressor_gptq(weight_RC, hessian_CC, group_size)
        theirs.append(output_error2(weight_RC, decoded_RC, hessian_CC))
        factor = factor_of(hessian_CC)
        # the same scales and no second look: what they do, in float64
        scale_CR = torch.from_numpy(widened(scale_RG, group_size)).T[factor.order_C]
        weight_CR = torch.from_numpy(weight_RC.astype(np.float64)).T[factor.order_C]
        codes_CR = round_with_feedback(weight_CR, scale_CR, factor.upper_CC)
        same_RC = (codes_CR * scale_CR)[torch.argsort(factor.order_C)].T.numpy()
        assert output_error2(weight_RC, same_RC, hessian_CC) == pytest.approx(theirs[-1], rel=0.02)  # they use FP32
        assert np.mean(np.isclose(same_RC, decoded_RC, atol=1e-6)) > 0.97
        made = quantize_gptq(weight_RC, factor, group_size=group_size, signed=True)
        ours.append(output_error2(weight_RC, made.codes_RC * widened(made.scale_RG, group_size), hessian_CC))
    assert max(np.array(ours) / theirs) < 0.9
    assert sum(ours) <= 0.8 * sum(theirs)


def compressor_gptq(weight_RC: np.ndarray, hessian_CC: torch.Tensor, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Decoded weights and BF16 scales of llm-compressor, in the order of its `GPTQModifier`; it works in its inputs."""
    from compressed_tensors.quantization import QuantizationArgs
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

    args = QuantizationArgs(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=group_size, actorder="static"
    )
    _, scale_RG = quantize_absmax(bfloat16.from_float32(weight_RC), group_size=group_size)
    scale = torch.from_numpy(bfloat16.to_float32(scale_RG))[None]
    decoded, _, used_fallback = quantize_weight(
        torch.tensor(weight_RC)[None], hessian_CC.float()[None], scale, torch.zeros_like(scale), None, args
    )
    assert not used_fallback.any()
    return decoded[0].numpy().astype(np.float64), scale_RG


@pytest.mark.parametrize("seed", SEEDS)
def test_errors_of_outputs_not_seen_fall_too(seed):
    """Half of the inputs make the Hessian, the other half judge: less than half of the search's error is left."""
    weight_RC, inputs = make_weight(seed, 64, 256), make_inputs(seed, 4096, 256)
    seen, unseen = (torch.from_numpy(part.T @ part / len(part)) for part in np.split(inputs, 2))
    made = quantize_gptq(weight_RC, factor_of(seen), group_size=32, signed=True)
    importance_C = search.importance_levels(seen.diagonal().numpy(), group_size=32)
    codes_RC, scale_RG = search.quantize_search(
        *grid.value_grid(weight_RC, group_size=32), group_size=32, signed=True, importance_C=importance_C
    )
    searched = output_error2(weight_RC, codes_RC * widened(scale_RG, 32), unseen)
    assert output_error2(weight_RC, made.codes_RC * widened(made.scale_RG, 32), unseen) < 0.5 * searched


def test_signed_scales_use_all_sixteen_codes():
    made = quantize_gptq(make_weight(3, 24, 128), factor_of(make_hessian(3, 128)), group_size=64, signed=True)
    assert made.codes_RC.min() == -8  # with signed scales the largest of a group may have it
    assert made.codes_RC.max() <= 7
    assert (bfloat16.to_float32(made.scale_RG) < 0).any()


def test_a_second_look_never_raises_the_error_and_ends_where_no_code_alone_lowers_it():
    weight_RC, hessian_CC = make_weight(5, 8, 96), make_hessian(5, 96)
    factor = factor_of(hessian_CC)
    _, scale_RG = quantize_absmax(bfloat16.from_float32(weight_RC), group_size=32)
    scale_CR, weight_CR = (
        torch.from_numpy(array.astype(np.float64)).T[factor.order_C] for array in (widened(scale_RG, 32), weight_RC)
    )

    def error(codes_CR: torch.Tensor) -> float:
        difference = weight_CR - codes_CR * scale_CR
        return float((factor.hessian_CC @ difference * difference).sum())

    codes_CR = round_with_feedback(weight_CR, scale_CR, factor.upper_CC)
    errors = [error(codes_CR)]
    for _ in range(20):
        codes_CR = look_again(weight_CR, scale_CR, codes_CR, factor.hessian_CC)
        errors.append(error(codes_CR))
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < 0.99 * errors[0]
    for column in range(96):
        for step in (-1, 1):
            other_CR = codes_CR.clone()
            other_CR[column] = (other_CR[column] + step).clamp(-8, 7)
            assert error(other_CR) >= errors[-1] * (1 - 1e-12)


def test_positive_scales_where_kernels_ask_for_them():
    made = quantize_gptq(make_weight(1, 16, 128), factor_of(make_hessian(1, 128)), group_size=128, signed=False)
    assert (bfloat16.to_float32(made.scale_RG) > 0).all()


def test_without_inputs_the_search_decides():
    weight_RC = make_weight(2, 16, 128)
    assert factorize(torch.zeros(128, 128), module="model.layers.0.mlp.up_proj") is None
    made = quantize_gptq(weight_RC, None, group_size=32, signed=True)
    codes_RC, scale_RG = search.quantize_search(*grid.value_grid(weight_RC, group_size=32), group_size=32, signed=True)
    np.testing.assert_array_equal(made.codes_RC, codes_RC)
    np.testing.assert_array_equal(made.scale_RG, scale_RG)


def test_a_channel_that_was_always_zero_is_rounded_to_nearest():
    weight_RC, inputs = make_weight(4, 16, 128), make_inputs(4, 512, 128)
    inputs[:, 40:72] = 0  # a whole group, and a part of the next
    made = quantize_gptq(weight_RC, factor_of(torch.from_numpy(inputs.T @ inputs)), group_size=32, signed=True)
    scale_RC = widened(made.scale_RG, 32)[:, 40:72]
    nearest_RC = np.clip(np.rint(weight_RC[:, 40:72] / scale_RC), -8, 7)
    np.testing.assert_array_equal(made.codes_RC[:, 40:72], nearest_RC)
    assert np.abs(nearest_RC).max() > 4


PROGRAM = """
import hashlib, sys, torch
torch.set_num_threads(int(sys.argv[1]))
from quantkit.gptq import factorize, quantize_gptq
from tests.gptq.inputs import make_hessian, make_weight
factor = factorize(make_hessian(7, 512).float(), module="one")
made = quantize_gptq(make_weight(7, 300, 512), factor, group_size=32, signed=True)
assert torch.get_num_threads() == int(sys.argv[1])
print(hashlib.sha256(made.codes_RC.tobytes() + made.scale_RG.tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_threads_do_not_change_bytes():
    digests = {
        subprocess.run([sys.executable, "-c", PROGRAM, threads], capture_output=True, text=True, check=True).stdout
        for threads in ("1", "3")
    }
    assert len(digests) == 1
