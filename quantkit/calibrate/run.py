"""Run a model over token sequences, layer by layer, and write down what was seen."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from quantkit import __version__
from quantkit.calibrate.observe import LayerObserver
from quantkit.calibrate.report import CalibrateReport, summarize
from quantkit.calibrate.work import Work, open_work
from quantkit.errors import UsageError
from quantkit.statistics.file import join_statistics, open_statistics
from quantkit.streaming import States, StreamedLayer, StreamedModel, Tokens, embed_tokens, open_states
from quantkit.streaming.ahead import ahead
from quantkit.threads import ReportProgress, Stage
from quantkit.weights.identity import model_fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """``output``: the file to write; while it is made, ``OUTPUT.partial`` stands beside it."""

    model: StreamedModel
    tokens: Tokens
    output: Path
    resume: bool = True
    report_progress: ReportProgress = lambda _, __: None


def calibrate(calibration: Calibration) -> CalibrateReport:
    """Raises UsageError where the output exists, ResourceError where the states do not fit, SourceError for damage.

    An interrupted run goes on behind the last layer that was done and gives the same bytes.
    """
    model, tokens = calibration.model, calibration.tokens
    _check_output(calibration.output, model.checkpoint.directory)
    fingerprint = model_fingerprint(model.binding, model.family, model.checkpoint.config)
    about = {
        "model": fingerprint,
        "tokens": tokens.sha256,
        "dtype": str(model.dtype).removeprefix("torch."),
        "version": __version__,
    }
    work = open_work(calibration.output, about, resume=calibration.resume)
    states = _states(calibration, work)
    sizes = model.layer_bytes()
    stage = Stage(label="calibrate", total_bytes=sum(sizes), earlier_bytes=sum(sizes[: states.layer]))
    calibration.report_progress(stage, 0)
    for layer in _layers(model, states.layer):
        observer = LayerObserver(len(layer.experts.weights) if layer.experts is not None else 0)
        layer.run(states, observer=observer)
        work.keep(layer.index, observer.arrays(), fingerprint)
        calibration.report_progress(stage, sizes[layer.index])
        del layer  # before the one after the next is loaded
    num_sequences, length = tokens.ids_NS.shape
    told = {
        "tokens": tokens.sha256,
        "num_sequences": str(num_sequences),
        "sequence_length": str(length),
        "dtype": about["dtype"],
        "quantkit_version": __version__,
    }
    join_statistics(calibration.output, work.parts(), model=fingerprint, about=told)
    work.remove()
    return summarize(open_statistics(calibration.output))


def _check_output(output: Path, source: Path) -> None:
    """In a source without an index, every safetensors file is one of its shards."""
    if output.exists() or output.is_symlink():
        raise UsageError("exists already", file=output, remedy="choose another -o, or remove it")
    if output.resolve().is_relative_to(source.resolve()):
        raise UsageError("lies in the source", file=output, remedy="choose a -o apart from it")


def _states(calibration: Calibration, work: Work) -> States:
    model, tokens = calibration.model, calibration.tokens
    num_sequences, length = tokens.ids_NS.shape
    states = open_states(
        num_sequences,
        length,
        model.hidden_size,
        dtype=model.dtype,
        directory=work.directory,
        layer=work.layers_done(),
    )
    if not states.layer:
        embed_tokens(model, tokens, states)
    return states


def _layers(model: StreamedModel, first: int) -> Iterator[StreamedLayer]:
    makers: list[Callable[[], StreamedLayer]] = [
        partial(model.layer, index) for index in range(first, model.num_layers)
    ]
    with torch.no_grad():
        yield from ahead(makers)
