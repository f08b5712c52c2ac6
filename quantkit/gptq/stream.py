"""GPTQ of a model that is never in memory as a whole: layer by layer, and in a layer expert by expert.

What a module is fed has gone through all layers before it as they will be served, quantized. Inside a layer the
Linears outside the experts are quantized side by side, then run again; gate and up of an expert come before its down.
Legend: R rows, C columns, G groups, T tokens, I inner width.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.gptq.factor import Factor, blend, factorize
from quantkit.gptq.hessians import LinearHessians, hessian_of
from quantkit.gptq.quantize import CodesAndScale, quantize_gptq
from quantkit.integrity.manifest import write_json
from quantkit.numerics import bfloat16
from quantkit.numerics.packing import Int4Words, pack_int4
from quantkit.streaming import ExpertVisit, States, StreamedLayer, StreamedModel, Tokens
from quantkit.streaming.devices import named_memory_errors
from quantkit.streaming.layer_files import run_layers
from quantkit.streaming.layer_journal import layer_file
from quantkit.threads import ReportProgress
from quantkit.words import WordsWriter, write_words

SAMPLE_TOKENS = 512
"""Of a layer, spread evenly, that stand for all of it where an expert's own tokens are few."""
_COUNTS = "tokens-{:05}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """``shapes``: rows and columns of every module that becomes INT4. ``directory``: for the words of each layer."""

    model: StreamedModel
    tokens: Tokens
    shapes: Mapping[str, tuple[int, int]]
    group_size: int
    signed: bool
    directory: Path
    report_progress: ReportProgress = lambda _, __: None


def stream_words(request: StreamRequest) -> None:
    """Write a file of words for every layer, going on behind the last that is there.

    Raises SourceError for weights or activations that are not finite, ResourceError where the states have no room, or
    what is computed.
    """
    run_layers(
        request.model,
        request.tokens,
        request.directory,
        "gptq",
        request.report_progress,
        partial(_write_layer, request),
    )


def expert_tokens(directory: Path) -> list[int]:
    """How many tokens each expert saw, of all layers that are written there; none where no expert was quantized."""
    return [
        count
        for path in sorted(directory.glob(_COUNTS.replace("{:05}", "*")))
        for count in json.loads(path.read_bytes()).values()
    ]


def _write_layer(request: StreamRequest, layer: StreamedLayer, states: States) -> None:
    prefix = f"{layer.name}."
    shapes = {module: shape for module, shape in request.shapes.items() if module.startswith(prefix)}
    path = layer_file(request.directory, layer.index)
    with write_words(path, shapes, group_size=request.group_size) as writer:
        for module, made in _quantized_linears(request, layer, states, shapes):
            writer.add(module, words_of(made))
        experts = _ExpertQuantizer(request, shapes, writer)
        layer.run(states, visit=experts if layer.experts is not None else None)
        if experts.num_tokens:  # before the words: where they are, so is this
            write_json(request.directory / _COUNTS.format(layer.index), experts.num_tokens)


@torch.no_grad()
def _quantized_linears(
    request: StreamRequest, layer: StreamedLayer, states: States, shapes: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[str, CodesAndScale]]:
    """Those outside the experts; the layer has their new weights from then on."""
    linears: dict[str, Any] = {
        f"{layer.name}.{inner}": module
        for inner, module in layer.module.named_modules()
        if isinstance(module, torch.nn.Linear) and f"{layer.name}.{inner}" in shapes
    }
    if not linears:
        return
    hessians = LinearHessians(linears)
    layer.attend(states, observer=hessians)
    for leader, modules in hessians.groups().items():
        with named_memory_errors(leader):
            factor = factorize(hessians.mean(leader), module=leader)
        for module in modules:
            weight = linears[module].weight
            with named_memory_errors(module):
                made = _quantize(request, weight, factor)
                weight.copy_(values_of(made, request.group_size))
            yield module, made


class _ExpertQuantizer:
    """Visits the experts of one layer."""

    def __init__(self, request: StreamRequest, shapes: Mapping[str, tuple[int, int]], writer: WordsWriter) -> None:
        self._request, self._shapes, self._writer = request, shapes, writer
        self._layer_CC: Tensor | None = None
        self.num_tokens: dict[str, int] = {}
        self._leaves = dict(zip(("gate", "up", "down"), request.model.family.expert_dims, strict=True))

    def __call__(self, one: ExpertVisit) -> None:
        names = {part: f"{one.experts}.{one.number}.{leaf}" for part, leaf in self._leaves.items()}
        wanted = {part: name for part, name in names.items() if name in self._shapes}
        if not wanted:
            return
        self.num_tokens[str(one.number)] = len(one.rows_T)
        if wanted.keys() - {"down"}:
            factor = self._gate_up(one, names["gate"])
            for part in ("gate", "up"):
                if part in wanted:
                    self._replace(one, part, wanted[part], factor)
        if "down" in wanted:
            self._replace(one, "down", wanted["down"], self._down(one, names["down"]))

    def _replace(self, one: ExpertVisit, part: str, module: str, factor: Factor | None) -> None:
        made = _quantize(self._request, one.weights[part], factor)
        one.weights[part] = values_of(made, self._request.group_size).to(one.weights[part])
        self._writer.add(module, words_of(made))

    def _gate_up(self, one: ExpertVisit, module: str) -> Factor | None:
        device, width = one.weights["gate"].device, one.weights["gate"].shape[1]
        if self._layer_CC is None:
            batches = (batch_TC.to(device) for batch_TC in torch.split(one.routing.inputs_TC, SAMPLE_TOKENS))
            self._layer_CC = hessian_of(batches, width, device).mean
        own = hessian_of((inputs_TC for _, inputs_TC in one.inputs()), width, device)
        return factorize(blend(own.mean, own.num_tokens, self._layer_CC), module=module)

    def _down(self, one: ExpertVisit, module: str) -> Factor | None:
        """Of what gate and up, quantized by now, make of the expert's tokens, and of some of the whole layer's."""
        device, width = one.weights["down"].device, one.weights["down"].shape[1]
        own = hessian_of((one.inner(inputs_TC) for _, inputs_TC in one.inputs()), width, device)
        every = max(1, len(one.routing.inputs_TC) // SAMPLE_TOKENS)
        sample_TC = one.routing.inputs_TC[::every][:SAMPLE_TOKENS].to(one.weights["gate"])
        layer = hessian_of([one.inner(sample_TC)], width, device)
        return factorize(blend(own.mean, own.num_tokens, layer.mean), module=module)


def _quantize(request: StreamRequest, weight_RC: Tensor, factor: Factor | None) -> CodesAndScale:
    values_RC = weight_RC.detach().float().cpu().numpy()
    return quantize_gptq(values_RC, factor, group_size=request.group_size, signed=request.signed)


def words_of(made: CodesAndScale) -> Int4Words:
    """As they are stored."""
    return Int4Words(pack_int4(made.codes_RC), made.scale_RG)


def values_of(made: CodesAndScale, group_size: int) -> Tensor:
    """float32 [R, C] that engines will compute with."""
    scale_RG = torch.from_numpy(bfloat16.to_float32(made.scale_RG))
    return torch.from_numpy(made.codes_RC).float() * scale_RG.repeat_interleave(group_size, dim=1)
