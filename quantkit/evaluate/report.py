"""Everything that an evaluation says of two checkpoints, put together."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from quantkit.evaluate.run import LayerError, Pair, evaluate, named
from quantkit.evaluate.same_model import check_same_model
from quantkit.evaluate.summary import Summary, summarize
from quantkit.evaluate.weights import WeightErrors, compare_weights
from quantkit.evaluate.workplace import workplace
from quantkit.families import Family
from quantkit.hidden_states import state_bytes
from quantkit.integrity.weight_errors import ClassError, WeightError, class_errors
from quantkit.module_names import layer_of
from quantkit.streaming import Tokens
from quantkit.threads import ReportProgress
from quantkit.weights.inspection import inspect_checkpoint


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
    for model in pair:
        with named(model):
            model.check(tokens)
    check_same_model(*pair, allow_other=request.allow_other_model)
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
        layer_classes=_by_layer(weights.errors, pair.source.root),
        missing=weights.missing,
        sizes=_sizes(pair),
    )


def _by_layer(errors: Iterable[WeightError], root: str) -> dict[int, tuple[ClassError, ...]]:
    """Of the text model: a vision part counts layers of its own."""
    layers: dict[int, list[WeightError]] = {}
    for error in errors:
        layer = layer_of(error.name)
        if layer is not None and layer.root == root:
            layers.setdefault(layer.number, []).append(error)
    return {number: class_errors(members) for number, members in sorted(layers.items())}


def _sizes(pair: Pair) -> tuple[PartSize, ...]:
    """Largest of the source first."""
    sizes: dict[str, list[int]] = {}
    for side, model in enumerate(pair):
        for part in inspect_checkpoint(model.checkpoint).parts:
            sizes.setdefault(part.role.value, [0, 0])[side] += part.num_bytes
    ordered = sorted(sizes.items(), key=lambda item: (-item[1][0], -item[1][1], item[0]))
    return tuple(PartSize(role=role, source_bytes=one, output_bytes=other) for role, (one, other) in ordered)
