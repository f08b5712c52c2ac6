"""GPTQ of a model that is run here: one layer in memory, its experts one at a time.

What a layer answers with its quantized weights is what the next one sees.
Suffixes: ``T`` tokens, ``R`` rows, ``C`` columns, ``I`` inner width of an expert.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn

from quantkit.checkpoint.disk import named_errors, remove, write_file
from quantkit.checkpoint.json_files import read_json
from quantkit.engines.fusion import fused_group
from quantkit.gptq.factor import PRIOR_TOKENS, Factor, blend, factorize
from quantkit.gptq.quantize import Calibrated, quantize_gptq
from quantkit.numerics.bfloat16 import to_float32
from quantkit.numerics.packing import Int4Words, pack_int4
from quantkit.streaming import ExpertVisit, States, StreamedLayer, StreamedModel, Tokens, open_states
from quantkit.streaming.ahead import ahead
from quantkit.threads import ReportProgress, Stage
from quantkit.words import WordsWriter

OutputError = tuple[float, float]  # squared error of a module's outputs, and their square
_LAYER = "layer-{:05}"
_STATES = "states"
_EMBEDDED = 1 << 16  # tokens at once


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedWords:
    """``shapes``: rows and columns of the modules that become INT4. ``directory``: where their words go."""

    model: StreamedModel
    tokens: Tokens
    shapes: Mapping[str, tuple[int, int]]
    group_size: int
    signed: bool
    directory: Path
    report_progress: ReportProgress = lambda _, __: None


def stream_words(request: StreamedWords) -> dict[str, OutputError]:
    """Write the words of every layer; goes on behind the last that an earlier run has finished.

    Returns the squared error and the square of the outputs of each module. Raises SourceError for hidden states that
    are not finite, ResourceError where they do not fit on the disk.
    """
    model, tokens, directory = request.model, request.tokens, request.directory
    first = _layers_done(directory)
    with named_errors(directory):
        (directory / _STATES).mkdir(exist_ok=True)
    num_sequences, length = tokens.ids_NS.shape
    states = open_states(
        num_sequences,
        length,
        model.hidden_size,
        dtype=model.dtype,
        directory=directory / _STATES,
        layer=first,
    )
    if not first:
        for begin, end in states.batches(_EMBEDDED):
            ids = tokens.ids[begin:end].reshape(-1)
            states.rows(states.hidden, begin, end)[:] = model.embed(ids).view(end - begin, states.length, -1)
    sizes = model.layer_bytes()
    stage = Stage(label="calibrate", total_bytes=sum(sizes), earlier_bytes=sum(sizes[:first]))
    request.report_progress(stage, 0)
    with torch.no_grad():
        for layer in ahead(partial(model.layer, index) for index in range(first, model.num_layers)):
            _Layer(request=request, layer=layer).run(states)
            request.report_progress(stage, sizes[layer.index])
    errors: dict[str, list[float]] = {}
    for index in range(model.num_layers):
        errors |= read_json(_done_path(directory, index), what="a layer that is done has it")
    with named_errors(directory):
        remove(directory / _STATES)
    return {module: (error2, output2) for module, (error2, output2) in errors.items()}


def _done_path(directory: Path, index: int) -> Path:
    return directory / f"{_LAYER.format(index)}.json"


def _layers_done(directory: Path) -> int:
    number = 0
    while _done_path(directory, number).is_file():
        number += 1
    return number


@dataclass(slots=True)
class _Sums:
    """``hessian_CC``: of the inputs so far, not divided by their number."""

    hessian_CC: torch.Tensor | None = None
    num_tokens: int = 0

    def add(self, inputs_TC: torch.Tensor) -> None:
        wide_TC = inputs_TC.float()
        product_CC = (wide_TC.T @ wide_TC).double()
        self.hessian_CC = product_CC if self.hessian_CC is None else self.hessian_CC.add_(product_CC)
        self.num_tokens += len(inputs_TC)

    def mean(self, width: int, device: torch.device) -> torch.Tensor:
        """Zeros where no input was seen."""
        if self.hessian_CC is None:
            return torch.zeros(width, width, dtype=torch.float64, device=device)
        return self.hessian_CC / self.num_tokens


@dataclass(slots=True, kw_only=True)
class _Layer:
    """One layer on its way. Modules with the same input share their sums."""

    request: StreamedWords
    layer: StreamedLayer
    errors: dict[str, OutputError] = field(default_factory=dict)
    sums: dict[str, _Sums] = field(default_factory=dict)
    shared: _Sums = field(default_factory=_Sums)  # of all that the experts are asked

    def run(self, states: States) -> None:
        prefix = f"{self.layer.name}."
        shapes = {name: shape for name, shape in self.request.shapes.items() if name.startswith(prefix)}
        path = self.request.directory / f"{_LAYER.format(self.layer.index)}.safetensors"
        done = _done_path(self.request.directory, self.layer.index)
        linears = [name for name, _ in self.layer.module.named_modules() if prefix + name in shapes]
        writer = WordsWriter(path, shapes, group_size=self.request.group_size) if shapes else None
        try:
            if linears:
                self.layer.attend(states, observer=self)
                self._quantize_linears(linears, writer)
            has_experts = len(linears) < len(shapes)
            self.layer.run(states, visit=partial(self._visit, writer) if has_experts else None)
            if writer is not None:
                writer.close()
        finally:
            if writer is not None:
                writer.abort()
        with named_errors(done):
            write_file(done, json.dumps(self.errors).encode())

    def linear(self, module: str, inputs_TC: torch.Tensor) -> None:
        """See `Observer`."""
        if module in self.request.shapes and module == self._first_of(module):
            self.sums.setdefault(module, _Sums()).add(inputs_TC)

    def expert(self, experts: str, number: int, inputs_TC: torch.Tensor, inner_TI: torch.Tensor) -> None:
        """See `Observer`. They are visited instead."""

    def cache(self, attention: str, part: str, values_THD: torch.Tensor) -> None:
        """See `Observer`."""

    def _first_of(self, module: str) -> str:
        """The sister that stands for all with the same input."""
        group = fused_group(module)
        sisters = [] if group is None else [f"{group[0]}.{leaf}" for leaf in group[1].members]
        return next((sister for sister in sisters if sister in self.request.shapes), module)

    def _quantize_linears(self, linears: list[str], writer: WordsWriter | None) -> None:
        factors: dict[str, Factor | None] = {}
        for inner in linears:
            module = f"{self.layer.name}.{inner}"
            first = self._first_of(module)
            linear = self.layer.module.get_submodule(inner)
            assert isinstance(linear, nn.Linear)
            if first not in factors:
                sums = self.sums.pop(first, _Sums())
                factors[first] = factorize(sums.mean(linear.in_features, linear.weight.device), module=first)
            linear.weight = nn.Parameter(
                self._quantized(module, linear.weight, factors[first], writer), requires_grad=False
            )

    def _visit(self, writer: WordsWriter | None, visit: ExpertVisit) -> None:
        """Gate and up by the inputs of this expert and of its layer; then down, by what these two answer."""
        inputs_TC = visit.routing.inputs_TC
        device = visit.weights["gate"].device
        if self.shared.hessian_CC is None:
            for part_TC in torch.split(inputs_TC, _EMBEDDED):
                self.shared.add(part_TC.to(device))
        width = inputs_TC.shape[1]
        module = f"{visit.experts}.{visit.number}"
        gate, up, down = (f"{module}.{leaf}" for leaf in self.request.model.family.expert_dims)
        own = _Sums()
        for _, part_TC in visit.inputs():
            own.add(part_TC)
        hessian_CC = blend(own.mean(width, device), own.num_tokens, self.shared.mean(width, device))
        factor = factorize(hessian_CC, module=gate)
        for part, name in (("gate", gate), ("up", up)):
            visit.weights[part] = self._quantized(name, visit.weights[part], factor, writer)
        step = max(1, len(inputs_TC) // PRIOR_TOKENS)
        own, prior = _Sums(), _Sums()
        prior.add(visit.inner(inputs_TC[::step][:PRIOR_TOKENS].to(visit.weights["gate"])))
        for _, part_TC in visit.inputs():
            own.add(visit.inner(part_TC))
        width = visit.weights["down"].shape[1]
        hessian_CC = blend(own.mean(width, device), own.num_tokens, prior.mean(width, device))
        visit.weights["down"] = self._quantized(down, visit.weights["down"], factorize(hessian_CC, module=down), writer)

    def _quantized(
        self, module: str, weight_RC: torch.Tensor, factor: Factor | None, writer: WordsWriter | None
    ) -> torch.Tensor:
        """The weight as it will be decoded; its words are written, where it is to become INT4."""
        if module not in self.request.shapes:
            return weight_RC
        assert writer is not None
        made = quantize_gptq(
            weight_RC.float().cpu().numpy(), factor, group_size=self.request.group_size, signed=self.request.signed
        )
        writer.add(module, Int4Words(pack_int4(made.codes_RC), made.scale_RG))
        self.errors[module] = (made.error2, made.output2)
        return _decoded(made, self.request.group_size).to(weight_RC)


def _decoded(made: Calibrated, group_size: int) -> torch.Tensor:
    scale_RC = torch.from_numpy(to_float32(made.scale_RG)).repeat_interleave(group_size, dim=1)
    return torch.from_numpy(made.codes_RC).float() * scale_RC
