"""A run over all layers that writes a file for each, and goes on behind the last file that is there."""

from collections.abc import Callable
from pathlib import Path

from quantkit.streaming.layer import StreamedLayer
from quantkit.streaming.model import StreamedModel, begin_states
from quantkit.streaming.states import States
from quantkit.streaming.tokens import Tokens
from quantkit.threads import ReportProgress, Stage

_NAME = "layer-{:05}.safetensors"
_STATES = "states"

RunLayer = Callable[[StreamedLayer, States], None]


def layer_file(directory: Path, layer: int) -> Path:
    """Of a layer by its number: whole, or not there."""
    return directory / _NAME.format(layer)


def layers_done(directory: Path) -> int:
    """Layers that have a file, without a gap from the first on."""
    number = 0
    while layer_file(directory, number).is_file():
        number += 1
    return number


def run_layers(
    model: StreamedModel, tokens: Tokens, directory: Path, label: str, report_progress: ReportProgress, each: RunLayer
) -> None:
    """``each`` takes the states through one layer and writes its file. ``label``: of the stage that is reported.

    States lie in a directory beside the files, which is removed behind the last layer. Raises ResourceError where they
    have no room, SourceError where an earlier run's are not there any more.
    """
    states_directory = directory / _STATES
    states_directory.mkdir(exist_ok=True)
    done = layers_done(directory)
    states = begin_states(model, tokens, directory=states_directory, layer=done)
    sizes = model.layer_bytes()
    stage = Stage(label=label, total_bytes=sum(sizes), earlier_bytes=sum(sizes[:done]), step="layer")
    report_progress(stage, 0)
    for layer in model.layers(done):
        each(layer, states)
        report_progress(stage, sizes[layer.index])
        del layer  # before the one after the next is loaded
    for path in states_directory.iterdir():
        path.unlink()
    states_directory.rmdir()
