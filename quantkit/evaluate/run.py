"""Both models over the same tokens in lockstep: layer by layer, then the head a block of the vocabulary at a time.

In memory are two layers without their experts, of which one is being loaded, and two or three experts; hidden states
of both models are in memory or in files.

Legend: T tokens, P predictions (all tokens but the last of a sequence), H hidden size, B tokens of the vocabulary.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from quantkit.errors import ResourceError, SourceError
from quantkit.evaluate.divergence import Divergence, Divergences
from quantkit.integrity.weight_errors import UNBOUNDED
from quantkit.streaming import States, StreamedLayer, StreamedModel, Tokens, begin_states
from quantkit.streaming.ahead import ahead
from quantkit.streaming.devices import named_memory_errors
from quantkit.threads import ReportProgress, Stage

ROWS_AT_ONCE = 512  # predictions whose logits for a block of the vocabulary are in memory, in float64
_TOKENS_AT_ONCE = 2048


class Pair(NamedTuple):
    """Always in this order."""

    source: StreamedModel
    output: StreamedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerError:
    """Relative RMS errors of the output behind a layer, of all tokens and channels; what went wrong before counts.

    ``experts``: of what the routed experts added, where there are any.
    """

    layer: int
    hidden: float
    experts: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """``divergence``: of the predictions of the first sequence, then of the second, ..."""

    divergence: Divergence
    layers: tuple[LayerError, ...]


@torch.no_grad()
def evaluate(
    pair: Pair, tokens: Tokens, *, work: Path | None, report_progress: ReportProgress = lambda _, __: None
) -> Evaluation:
    """``work``: an empty directory for hidden states, which otherwise are in memory.

    Raises SourceError for what is not finite, with checkpoint, layer and token, and for weights that are missing;
    ResourceError where memory ends.
    """
    layer_bytes = [model.layer_bytes() for model in pair]
    num_steps = sum(map(len, layer_bytes))
    stage = Stage(label="evaluate", total_bytes=sum(map(sum, layer_bytes)), step="layer", num_steps=num_steps)
    report_progress(stage, 0)
    states = [_embedded(model, tokens, work, name) for model, name in zip(pair, Pair._fields, strict=True)]
    layers = tuple(_run_layers(pair, states, layer_bytes, partial(report_progress, stage)))
    head_bytes = sum(model.head_weight.stored_bytes for model in pair)
    stage = Stage(label="compare predictions", total_bytes=head_bytes, step="block of the vocabulary")
    report_progress(stage, 0)
    divergence = _run_heads(pair, states, tokens, partial(report_progress, stage))
    return Evaluation(divergence=divergence, layers=layers)


def _embedded(model: StreamedModel, tokens: Tokens, work: Path | None, name: str) -> States:
    directory = None if work is None else work / name
    if directory is not None:
        directory.mkdir()
    with named(model):
        return begin_states(model, tokens, directory=directory)


def _run_layers(
    pair: Pair, states: list[States], layer_bytes: list[list[int]], advance: Callable[[int], None]
) -> Iterator[LayerError]:
    makers = (partial(_load, model, index) for index in range(pair.source.num_layers) for model in pair)
    answers: list[Tensor | None] = []
    for layer in ahead(makers):
        side = len(answers)
        with named(pair[side]):
            answers.append(layer.run(states[side]))
        index = layer.index
        del layer  # before the one after the next is loaded
        advance(layer_bytes[side][index])
        if side == len(pair) - 1:
            source_TH, output_TH = answers
            yield LayerError(
                layer=index,
                hidden=_relative_error(states[0].hidden, states[1].hidden),
                experts=None if source_TH is None or output_TH is None else _relative_error(source_TH, output_TH),
            )
            answers = []


def _load(model: StreamedModel, index: int) -> StreamedLayer:
    with named(model):
        return model.layer(index)


def _run_heads(pair: Pair, states: list[States], tokens: Tokens, advance: Callable[[int], None]) -> Divergence:
    normed = [_normed(model, one) for model, one in zip(pair, states, strict=True)]
    ids_NS = tokens.ids
    divergences = Divergences(ids_NS[:, 1:].reshape(-1))
    places_P = torch.arange(ids_NS.numel()).view(ids_NS.shape)[:, :-1].reshape(-1)
    row_bytes = sum(model.head_weight.stored_bytes for model in pair) // pair.source.vocabulary
    heads = zip(*(_head_blocks(model) for model in pair), strict=True)
    for (first, source_BH), (_, output_BH) in heads:
        for begin in range(0, len(places_P), ROWS_AT_ONCE):
            rows = slice(begin, min(begin + ROWS_AT_ONCE, len(places_P)))
            logits = [
                _logits(model, normed_TH[places_P[rows]], block_BH)
                for model, normed_TH, block_BH in zip(pair, normed, (source_BH, output_BH), strict=True)
            ]
            divergences.add(rows, first, *logits)
        advance(len(source_BH) * row_bytes)
    return divergences.finish()


def _head_blocks(model: StreamedModel) -> Iterator[tuple[int, Tensor]]:
    with named(model):
        yield from model.head_blocks()


def _normed(model: StreamedModel, states: States) -> Tensor:
    """[T, H] where there is room already: no layer follows."""
    normed_TH = states.after
    for first in range(0, states.num_tokens, _TOKENS_AT_ONCE):
        part = slice(first, first + _TOKENS_AT_ONCE)
        with named(model):
            normed_TH[part] = model.normed(states.hidden[part])
    return normed_TH


def _logits(model: StreamedModel, normed_PH: Tensor, block_BH: Tensor) -> Tensor:
    """In float32 whatever the states are in: their rounding would stand above the divergence of a good output."""
    with named(model), named_memory_errors(model.head_weight.name):
        logits_PB = F.linear(normed_PH.to(model.device).float(), block_BH.float()).cpu()
    if not bool(logits_PB.isfinite().all()):
        raise SourceError(
            "its logits are not finite",
            tensor=model.head_weight.name,
            file=model.checkpoint.directory,
            remedy="the weights of the head are damaged: download the shard again",
        )
    return logits_PB


def _relative_error(source_TH: Tensor, output_TH: Tensor) -> float:
    error2 = weight2 = 0.0
    for first in range(0, len(source_TH), _TOKENS_AT_ONCE):
        values_TH = source_TH[first : first + _TOKENS_AT_ONCE].double()
        weight2 += float(values_TH.square().sum())
        error2 += float(values_TH.sub_(output_TH[first : first + _TOKENS_AT_ONCE]).square_().sum())
    if weight2:
        return math.sqrt(error2 / weight2)
    return 0.0 if error2 == 0 else UNBOUNDED


@contextmanager
def named(model: StreamedModel) -> Iterator[None]:
    """Errors say which of the two checkpoints they are about: their tensors have the same names."""
    try:
        yield
    except (SourceError, ResourceError) as error:
        if error.file is None or "/" not in error.file:
            error.file = str(model.checkpoint.directory / (error.file or ""))
        raise
