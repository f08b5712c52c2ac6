"""Run a model over token sequences, layer by layer, and write down what was seen."""

from dataclasses import dataclass
from pathlib import Path

from quantkit import __version__
from quantkit.calibrate.observe import LayerObserver
from quantkit.calibrate.report import CalibrateReport, summarize
from quantkit.calibrate.work import open_work
from quantkit.errors import UsageError
from quantkit.statistics.file import join_statistics, open_statistics
from quantkit.streaming import StreamedModel, Tokens, begin_states
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
    if calibration.output.exists():
        raise UsageError("exists already", file=calibration.output, remedy="choose another -o, or remove it")
    fingerprint = model_fingerprint(model.binding, model.family, model.checkpoint.config)
    about = {
        "model": fingerprint,
        "tokens": tokens.sha256,
        "dtype": str(model.dtype).removeprefix("torch."),
        "version": __version__,
    }
    work = open_work(calibration.output, about, resume=calibration.resume)
    states = begin_states(model, tokens, directory=work.directory, layer=work.layers_done())
    sizes = model.layer_bytes()
    stage = Stage(label="calibrate", total_bytes=sum(sizes), earlier_bytes=sum(sizes[: states.layer]))
    calibration.report_progress(stage, 0)
    for layer in model.layers(states.layer):
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
