"""Everything that an evaluation says of two checkpoints, put together."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import UsageError
from quantkit.evaluate.run import LayerError, Pair, evaluate
from quantkit.evaluate.same_model import check_same_model
from quantkit.evaluate.summary import Summary, summarize
from quantkit.evaluate.weights import WeightErrors, compare_weights
from quantkit.evaluate.workplace import workplace
from quantkit.families import Family
from quantkit.hidden_states import state_bytes
from quantkit.integrity.weight_errors import ClassError, WeightError, class_errors
from quantkit.streaming import StreamedModel, Tokens
from quantkit.threads import ReportProgress
from quantkit.weights.inspection import inspect_checkpoint

_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """``work``: a directory for hidden states; where none is named and they are many, one is made in ``beside``.
    ``is_fast`` leaves the errors of weights out.
    """

    work: Path | None
    beside: Path
    is_fast: bool
    allow_other_model: bool
    num_jobs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSize:
    """Stored bytes of a role in both checkpoints."""

    role: str
    source_bytes: int
    output_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateReport:
    """``layer_classes``: weight errors of a layer by role. ``missing``: see ``WeightErrors``."""

    family: Family
    model_type: str
    tokens: Tokens
    summary: Summary
    layers: tuple[LayerError, ...]
    classes: tuple[ClassError, ...]
    layer_classes: Mapping[int, tuple[ClassError, ...]]
    missing: tuple[str, ...]
    sizes: tuple[PartSize, ...]


def make_report(pair: Pair, tokens: Tokens, request: Request, *, report_progress: ReportProgress) -> EvaluateReport:
    """Run both, compare their weights and sizes. Raises what can be seen in headers before anything is run."""
    check_same_model(*pair, allow_other=request.allow_other_model)
    _check_length(pair.source, tokens)
    needed = sum(state_bytes(tokens.ids_NS.size, model.hidden_size, value_bytes=model.dtype.itemsize) for model in pair)
    with workplace(request.work, beside=request.beside, needed_bytes=needed) as directory:
        evaluation = evaluate(pair, tokens, work=directory, report_progress=report_progress)
    weights = WeightErrors(errors=(), missing=())
    if not request.is_fast:
        weights = compare_weights(
            pair.source.binding,
            pair.output.binding,
            pair.source.family,
            num_jobs=request.num_jobs,
            report_progress=report_progress,
        )
    return EvaluateReport(
        family=pair.source.family,
        model_type=str(pair.source.family.text_config(pair.source.checkpoint.config).get("model_type")),
        tokens=tokens,
        summary=summarize(evaluation.divergence, len(tokens.ids_NS)),
        layers=evaluation.layers,
        classes=class_errors(weights.errors),
        layer_classes=_by_layer(weights.errors),
        missing=weights.missing,
        sizes=_sizes(pair),
    )


def _check_length(model: StreamedModel, tokens: Tokens) -> None:
    length, most = tokens.ids_NS.shape[1], int(model.skeleton.config.max_position_embeddings)
    if length > most:
        raise UsageError(f"sequences of {length:,} tokens are longer than this model reads", remedy=f"at most {most:,}")


def _by_layer(errors: Iterable[WeightError]) -> dict[int, tuple[ClassError, ...]]:
    layers: dict[int, list[WeightError]] = {}
    for error in errors:
        place = _LAYER.search(error.name)
        if place is not None:
            layers.setdefault(int(place[1]), []).append(error)
    return {layer: class_errors(members) for layer, members in sorted(layers.items())}


def _sizes(pair: Pair) -> tuple[PartSize, ...]:
    """Largest of the source first."""
    sizes: dict[str, list[int]] = {}
    for side, model in enumerate(pair):
        for part in inspect_checkpoint(model.checkpoint).parts:
            sizes.setdefault(part.role.value, [0, 0])[side] += part.num_bytes
    ordered = sorted(sizes.items(), key=lambda item: (-item[1][0], -item[1][1], item[0]))
    return tuple(PartSize(role=role, source_bytes=one, output_bytes=other) for role, (one, other) in ordered)
