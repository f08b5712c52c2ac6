"""Run a model over token sequences, layer by layer, and write down what was seen."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quantkit import __version__
from quantkit.calibrate.observe import LayerObserver
from quantkit.calibrate.report import CalibrateReport, summarize
from quantkit.calibrate.work import Work, work_of
from quantkit.checkpoint.begun import remove_left, run_directory
from quantkit.checkpoint.source import source_stamps
from quantkit.checkpoint.whole_file import check_new_file
from quantkit.errors import QuantkitError, UsageError
from quantkit.statistics.file import join_statistics, open_statistics
from quantkit.statistics.fingerprint import Fingerprint
from quantkit.streaming import States, StreamedLayer, StreamedModel, Tokens, told_tokens
from quantkit.streaming.layer_files import run_layers
from quantkit.threads import ReportProgress
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

    Nothing is made before headers have told what they can of that. An interrupted run goes on behind the last layer
    that was done and gives the same bytes.
    """
    model, tokens = calibration.model, calibration.tokens
    check_output(calibration.output, model.checkpoint.directory)
    model.check(tokens)
    fingerprint = model_fingerprint(model.binding, model.family, model.checkpoint.config)
    dtype = str(model.dtype).removeprefix("torch.")
    document = {
        "model": fingerprint.norms,
        "source": source_stamps(model.checkpoint),
        "tokens": tokens.told,
        "dtype": dtype,
        "version": __version__,
    }
    work = Work(directory=work_of(calibration.output))
    with run_directory(work.directory, document, resume=calibration.resume, has_work=lambda _: work.layers_done() > 0):
        _run_layers(calibration, work, fingerprint)
        join_statistics(calibration.output, work.parts(), model=fingerprint, about=_about(tokens, dtype))
        work.remove()
    return summarize(open_statistics(calibration.output))


def check_output(output: Path, source: Path) -> None:
    """Raise UsageError where the file cannot be made.

    In a source without an index, every safetensors file is one of its shards.
    """
    try:
        check_new_file(output, outside=source)
    except UsageError:
        _remove_left(output)
        raise


def _remove_left(output: Path) -> None:
    """What the run has left that made the file and was killed right behind: the file says of itself which it was."""
    with suppress(QuantkitError):  # it is no statistics file
        statistics = open_statistics(output)
        about = statistics.metadata
        tokens = told_tokens(*(about.get(key, "") for key in ("num_sequences", "sequence_length", "tokens")))
        versions = {"dtype": about.get("dtype"), "version": about.get("quantkit_version")}
        run = {"model": statistics.model, "tokens": tokens, **versions}
        remove_left(work_of(output), lambda begun: {**begun, "source": None} == {**run, "source": None})


def _run_layers(calibration: Calibration, work: Work, fingerprint: Fingerprint) -> None:
    def each(layer: StreamedLayer, states: States) -> None:
        observer = LayerObserver(len(layer.experts.weights) if layer.experts is not None else 0)
        layer.run(states, observer=observer)
        work.keep(layer.index, observer.arrays(), fingerprint)

    run_layers(calibration.model, calibration.tokens, work.directory, "calibrate", calibration.report_progress, each)


def _about(tokens: Tokens, dtype: str) -> dict[str, str]:
    num_sequences, length = tokens.ids_NS.shape
    return {
        "tokens": tokens.sha256,
        "num_sequences": str(num_sequences),
        "sequence_length": str(length),
        "dtype": dtype,
        "quantkit_version": __version__,
    }
