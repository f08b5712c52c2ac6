"""Statistics of all predictions. Tokens of one sequence are no independent draws, so standard errors are of sequences.

Legend: N sequences, P predictions of each.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantkit.evaluate.divergence import Divergence, Values

_BINS_A_DECADE = 4
_DECADES = (-9, 2)  # what is below, zero among it, is counted in front
_QUANTILES = (0.5, 0.9, 0.99, 0.999)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """``standard_error``: None where one sequence tells nothing of the others."""

    value: float
    standard_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KlDivergence:
    """In nats; ``p99_9``: 99.9 % of the predictions are at most so far apart."""

    mean: Estimate
    median: float
    p90: float
    p99: float
    p99_9: float
    maximum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """``counts[i]`` lie in [edges[i], edges[i + 1]), ``below`` in front of the first edge. Edges are logarithmic."""

    below: int
    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """``ratio``: perplexity of the output, of the source's."""

    num_predictions: int
    source_perplexity: float
    output_perplexity: float
    ratio: Estimate
    kl: KlDivergence
    same_top: Estimate
    top_shift_rms: float
    top_shift_mean: float
    histogram: Histogram


def summarize(divergence: Divergence, num_sequences: int) -> Summary:
    """``divergence``: of the predictions of the first sequence, then of the second, all of one length."""
    kl_NP = divergence.kl.reshape(num_sequences, -1)
    median, p90, p99, p99_9 = (float(one) for one in np.quantile(divergence.kl, _QUANTILES))
    change = sequence_mean((divergence.output_nll - divergence.source_nll).reshape(num_sequences, -1))
    ratio = math.exp(change.value)
    return Summary(
        num_predictions=divergence.kl.size,
        source_perplexity=math.exp(divergence.source_nll.mean()),
        output_perplexity=math.exp(divergence.output_nll.mean()),
        # the ratio is exp of the change: by the delta method its error is the change's times the ratio
        ratio=Estimate(
            value=ratio, standard_error=None if change.standard_error is None else ratio * change.standard_error
        ),
        kl=KlDivergence(
            mean=sequence_mean(kl_NP), median=median, p90=p90, p99=p99, p99_9=p99_9, maximum=float(kl_NP.max())
        ),
        same_top=sequence_mean(divergence.same_top.reshape(num_sequences, -1).astype(np.float64)),
        top_shift_rms=math.sqrt(np.square(divergence.top_shift).mean()),
        top_shift_mean=float(divergence.top_shift.mean()),
        histogram=histogram_of(divergence.kl),
    )


def sequence_mean(values_NP: Values) -> Estimate:
    """Mean of all, with the standard error of a mean of sequences."""
    means_N = values_NP.mean(axis=1)
    error = None if len(means_N) < 2 else float(means_N.std(ddof=1) / math.sqrt(len(means_N)))
    return Estimate(value=float(means_N.mean()), standard_error=error)


def histogram_of(values: NDArray[np.float64]) -> Histogram:
    """From the first bin that holds something to the last; where all lie below the bins there is none."""
    first, last = (decade * _BINS_A_DECADE for decade in _DECADES)
    edges = 10.0 ** (np.arange(first, last + 1) / _BINS_A_DECADE)
    places = np.searchsorted(edges, values, side="right") - 1
    counts = np.bincount(np.minimum(places[places >= 0], len(edges) - 2), minlength=len(edges) - 1)
    held = np.flatnonzero(counts)
    below = int((places < 0).sum())
    if not held.size:
        return Histogram(below=below, edges=(), counts=())
    begin, end = int(held[0]), int(held[-1]) + 1
    return Histogram(
        below=below, edges=tuple(edges[begin : end + 1].tolist()), counts=tuple(counts[begin:end].tolist())
    )
