"""INT4 by GPTQ: scales by the search, columns rounded one by one, each error made good in those that follow.

The error that counts is that of the outputs, ``tr(D H D^T)`` for the difference D of the weights. Scales come first,
from the weights as they are, so that columns can be taken by their second moment, whatever their group. Then every
code is looked at again, with all others as they are.

Suffixes: ``R`` rows, ``C`` columns, ``G`` groups along C. Tensors are turned round, [C, R]: a column lies together.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.gptq.factor import Factor
from quantkit.gptq.threads import one_thread
from quantkit.numerics import bfloat16
from quantkit.transcode import search_values

LOWEST, HIGHEST = -8, 7
NUM_SWEEPS = 2
_BLOCK = 128  # columns whose errors reach the others together


@dataclass(frozen=True, slots=True, kw_only=True)
class CodesAndScale:
    """``codes_RC`` int8, ``scale_RG`` BF16 bits."""

    codes_RC: NDArray[np.int8]
    scale_RG: NDArray[np.uint16]


def quantize_gptq(
    weight_RC: NDArray[np.float32], factor: Factor | None, *, group_size: int, signed: bool
) -> CodesAndScale:
    """``factor``: of the inputs; without one the search alone decides, as it does without calibration.

    A channel that was always zero counts for nothing and gets no errors of others: it is rounded to nearest.
    """
    moments_C = None if factor is None else factor.moments_C.cpu().numpy()
    codes_RC, scale_RG = search_values(weight_RC, group_size=group_size, signed=signed, moments_C=moments_C)
    if factor is None:
        return CodesAndScale(codes_RC=codes_RC, scale_RG=scale_RG)
    device = factor.order_C.device
    scale = torch.from_numpy(bfloat16.to_float32(scale_RG)).to(device).double()
    scale_CR = scale.repeat_interleave(group_size, dim=1).T[factor.order_C]
    weight_CR = torch.from_numpy(weight_RC).to(device).double().T[factor.order_C]
    with one_thread():
        codes_CR = round_with_feedback(weight_CR, scale_CR, factor.upper_CC)
        for _ in range(NUM_SWEEPS):
            codes_CR = look_again(weight_CR, scale_CR, codes_CR, factor.hessian_CC)
    codes_CR = codes_CR[torch.argsort(factor.order_C)]
    codes_RC = np.ascontiguousarray(codes_CR.T.to(torch.int8).cpu().numpy())
    return CodesAndScale(codes_RC=codes_RC, scale_RG=scale_RG)


def round_with_feedback(weight_CR: torch.Tensor, scale_CR: torch.Tensor, upper_CC: torch.Tensor) -> torch.Tensor:
    """Codes, as float64. Each column is rounded half to even, and its error spread over the columns behind it."""
    weight_CR, codes_CR = weight_CR.clone(), torch.empty_like(weight_CR)
    for first in range(0, len(weight_CR), _BLOCK):
        last = min(first + _BLOCK, len(weight_CR))
        errors_BR = torch.empty_like(weight_CR[first:last])
        for column in range(first, last):
            codes_CR[column] = _codes(weight_CR[column], scale_CR[column])
            error_R = weight_CR[column] - codes_CR[column] * scale_CR[column]
            error_R /= upper_CC[column, column]
            errors_BR[column - first] = error_R
            weight_CR[column + 1 : last].addr_(upper_CC[column, column + 1 : last], error_R, alpha=-1)
        weight_CR[last:].addmm_(upper_CC[first:last, last:].T, errors_BR, alpha=-1)
    return codes_CR


def look_again(
    weight_CR: torch.Tensor, scale_CR: torch.Tensor, codes_CR: torch.Tensor, hessian_CC: torch.Tensor
) -> torch.Tensor:
    """Once over all columns: the best code for each, all others being as they are. The error never grows."""
    codes_CR = codes_CR.clone()
    slope_CR = hessian_CC @ (weight_CR - codes_CR * scale_CR)
    for first in range(0, len(weight_CR), _BLOCK):
        last = min(first + _BLOCK, len(weight_CR))
        steps_BR = torch.empty_like(weight_CR[first:last])
        for column in range(first, last):
            old_R, scale_R = codes_CR[column].clone(), scale_CR[column]
            best_R = old_R * scale_R + slope_CR[column] / hessian_CC[column, column]
            codes_CR[column] = _codes(best_R, scale_R)
            steps_BR[column - first] = step_R = (codes_CR[column] - old_R) * scale_R
            slope_CR[column + 1 : last].addr_(hessian_CC[column + 1 : last, column], step_R, alpha=-1)
        slope_CR[last:].addmm_(hessian_CC[last:, first:last], steps_BR, alpha=-1)
    return codes_CR


def _codes(values_R: torch.Tensor, scale_R: torch.Tensor) -> torch.Tensor:
    return torch.round(values_R / scale_R).clamp_(LOWEST, HIGHEST)
