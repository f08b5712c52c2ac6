"""How far two predictions of every next token lie apart: sums over the vocabulary in float64, a block of it at a time.

The softmax runs over the whole vocabulary, of which a block is in memory for some predictions at once: every head is
decoded once, however many tokens there are.

Legend: P predictions, B tokens of a block of the vocabulary.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Of every prediction: KL divergence of the output from the source in nats, negative log-likelihood of the token
    that follows, whether both hold the same token for the likeliest, and how much probability the output gives the
    source's likeliest token more than the source.
    """

    kl: Values
    source_nll: Values
    output_nll: Values
    same_top: NDArray[np.bool_]
    top_shift: Values


@dataclass(slots=True, kw_only=True)
class _Side:
    """What is known of one model's logits so far. ``sum_P`` is of exp(logit - peak)."""

    peak_P: Tensor
    sum_P: Tensor
    next_P: Tensor
    top_P: Tensor  # ids

    @staticmethod
    def of(num_predictions: int) -> "_Side":
        return _Side(
            peak_P=torch.full((num_predictions,), -torch.inf, dtype=torch.float64),
            sum_P=torch.zeros(num_predictions, dtype=torch.float64),
            next_P=torch.zeros(num_predictions, dtype=torch.float64),
            top_P=torch.zeros(num_predictions, dtype=torch.int64),
        )

    @property
    def log_sum(self) -> Tensor:
        return self.peak_P + self.sum_P.log()

    def add(self, rows: slice, first: int, logits_PB: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns exp(logit - peak), what earlier sums are to be multiplied by, and where there is a new peak.

        Of equal logits the first is the likeliest.
        """
        block_peak_P, block_top_P = logits_PB.max(-1)
        before_P = self.peak_P[rows]
        is_new_P = block_peak_P > before_P
        peak_P = torch.maximum(before_P, block_peak_P)
        exp_PB = (logits_PB - peak_P.unsqueeze(-1)).exp_()
        factor_P = (before_P - peak_P).exp()
        self.sum_P[rows] = self.sum_P[rows] * factor_P + exp_PB.sum(-1)
        self.peak_P[rows] = peak_P
        self.top_P[rows] = torch.where(is_new_P, block_top_P + first, self.top_P[rows])
        return exp_PB, factor_P, is_new_P


@dataclass(slots=True)
class Divergences:
    """Takes the logits of both models, block after block of the vocabulary. ``next_P``: the tokens that follow."""

    next_P: Tensor
    _source: _Side = field(init=False)
    _output: _Side = field(init=False)
    _gap_P: Tensor = field(init=False)  # sum of exp(source - peak) (source - output)
    _at_top_P: Tensor = field(init=False)  # the output's logit of the source's likeliest token

    def __post_init__(self) -> None:
        num_predictions = len(self.next_P)
        self._source, self._output = _Side.of(num_predictions), _Side.of(num_predictions)
        self._gap_P = torch.zeros(num_predictions, dtype=torch.float64)
        self._at_top_P = torch.zeros(num_predictions, dtype=torch.float64)

    def add(self, rows: slice, first: int, source_PB: Tensor, output_PB: Tensor) -> None:
        """Logits of the predictions ``rows`` for the tokens from ``first`` on."""
        source_PB, output_PB = source_PB.double(), output_PB.double()
        exp_PB, factor_P, is_new_P = self._source.add(rows, first, source_PB)
        self._gap_P[rows] = self._gap_P[rows] * factor_P + exp_PB.mul_(source_PB - output_PB).sum(-1)
        self._output.add(rows, first, output_PB)
        top_P1 = (self._source.top_P[rows] - first).clamp(min=0).unsqueeze(-1)  # in this block where it is new
        self._at_top_P[rows] = torch.where(is_new_P, output_PB.gather(1, top_P1).squeeze(1), self._at_top_P[rows])
        within_P = torch.nonzero((self.next_P[rows] >= first) & (self.next_P[rows] < first + source_PB.shape[1]))[:, 0]
        places_P = self.next_P[rows][within_P] - first
        for side, logits_PB in ((self._source, source_PB), (self._output, output_PB)):
            side.next_P[rows.start + within_P] = logits_PB[within_P, places_P]

    def finish(self) -> Divergence:
        """Once the whole vocabulary has been added for every prediction."""
        source, output = self._source, self._output
        # sum of p (log p - log q); what rounding leaves below zero is none
        kl_P = (self._gap_P / source.sum_P - (source.log_sum - output.log_sum)).clamp(min=0)
        shift_P = (self._at_top_P - output.log_sum).exp() - (source.peak_P - source.log_sum).exp()
        return Divergence(
            kl=kl_P.numpy(),
            source_nll=(source.log_sum - source.next_P).numpy(),
            output_nll=(output.log_sum - output.next_P).numpy(),
            same_top=(source.top_P == output.top_P).numpy(),
            top_shift=shift_P.numpy(),
        )
