"""What the inputs of a module say of its columns: their order, how errors move between them, how much they count.

The Hessian is the mean of ``x x^T`` over the inputs x, and so symmetric without negative eigenvalues.
Suffixes: ``C`` columns of the weight (channels of the input).
"""

from dataclasses import dataclass

import torch

from quantkit.errors import SourceError
from quantkit.gptq.threads import one_thread

DAMPING = 0.01
"""What is added to the diagonal, in parts of its mean: inputs that calibration did not see count as much as noise."""
_MORE_DAMPING, _MOST_DAMPING = 10.0, 1.0
PRIOR_TOKENS = 512
"""Tokens that a layer's Hessian counts for beside those that an expert saw itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """Of one Hessian, for every weight with these inputs. Float64, rows and columns in the order of ``order_C``.

    ``order_C``: columns by their second moment, the largest first. ``hessian_CC``: with ``damping`` times the mean of
    the diagonal added to it. ``upper_CC``: U of ``inverse(hessian) = U^T U``. ``moments_C``: the diagonal as it came,
    in the weight's own order.
    """

    order_C: torch.Tensor
    hessian_CC: torch.Tensor
    upper_CC: torch.Tensor
    moments_C: torch.Tensor
    damping: float


def blend(own_CC: torch.Tensor, num_tokens: int, layer_CC: torch.Tensor) -> torch.Tensor:
    """The mean Hessian of an expert that saw ``num_tokens`` itself, drawn to its layer's as that is less known.

    As if it had seen ``PRIOR_TOKENS`` more that are like those of the whole layer.
    """
    share = num_tokens / (num_tokens + PRIOR_TOKENS)
    return own_CC.double() * share + layer_CC.to(own_CC.device).double() * (1 - share)


def factorize(hessian_CC: torch.Tensor, *, module: str, damping: float = DAMPING) -> Factor | None:
    """None where no input was ever seen, so that nothing is known of any column.

    Damping grows tenfold, up to the mean of the diagonal itself, until there is a factor. ``module`` is for errors.
    Raises SourceError for what is no Hessian.
    """
    hessian_CC = hessian_CC.double()
    moments_C = hessian_CC.diagonal().clone()
    if not torch.isfinite(hessian_CC).all() or bool((moments_C < 0).any()):
        _refuse(module, "holds NaN, Inf or squares below 0")
    if not bool(moments_C.any()):
        return None
    order_C = torch.argsort(moments_C, descending=True, stable=True)
    ordered_CC = hessian_CC[order_C][:, order_C]
    with one_thread():
        while True:
            damped_CC = ordered_CC.clone()
            damped_CC.diagonal().add_(damping * moments_C.mean())
            upper_CC = _inverse_factor(damped_CC)
            if upper_CC is not None:
                break
            if damping >= _MOST_DAMPING:
                _refuse(module, "has eigenvalues far below 0")
            damping = min(damping * _MORE_DAMPING, _MOST_DAMPING)
    return Factor(order_C=order_C, hessian_CC=damped_CC, upper_CC=upper_CC, moments_C=moments_C, damping=damping)


def _inverse_factor(hessian_CC: torch.Tensor) -> torch.Tensor | None:
    """None where the matrix is not positive definite, or so nearly not that its inverse is none."""
    lower_CC, info = torch.linalg.cholesky_ex(hessian_CC)
    if int(info):
        return None
    upper_CC, info = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower_CC), upper=True)
    return None if int(info) or not bool(torch.isfinite(upper_CC).all()) else upper_CC


def _refuse(module: str, what: str) -> None:
    raise SourceError(
        f"its Hessian {what}", tensor=module, remedy="the inputs that calibration saw are wrong; look at the text"
    )
