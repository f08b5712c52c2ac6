"""A run over all layers that writes a file for each, and goes on behind the last that is what it was."""

from collections.abc import Callable
from pathlib import Path

from quantkit.streaming.layer import StreamedLayer
from quantkit.streaming.layer_journal import add_layer, sound_layers, states_directory
from quantkit.streaming.model import StreamedModel, begin_states
from quantkit.streaming.states import States
from quantkit.streaming.tokens import Tokens
from quantkit.threads import ReportProgress, Stage

RunLayer = Callable[[StreamedLayer, States], None]


def run_layers(
    model: StreamedModel, tokens: Tokens, directory: Path, label: str, report_progress: ReportProgress, each: RunLayer
) -> None:
    """``each`` takes the states through one layer and writes its file. ``label``: of the stage that is reported.

    States lie in a directory beside the files, which is removed behind the last layer. What an earlier run has left is
    hashed before it is believed; where it is damaged, the stage says so, and the layers behind what is sound are run
    again. Raises ResourceError where the states have no room.
    """
    sound = sound_layers(directory, model.num_layers)
    sizes = model.layer_bytes()
    if sound.damaged is not None:
        label = f"{label} (again from layer {sound.layers}: {sound.damaged.name} was damaged)"
    earlier_bytes, num_steps = sum(sizes[: sound.layers]), len(sizes) - sound.layers
    stage = Stage(label=label, total_bytes=sum(sizes), earlier_bytes=earlier_bytes, step="layer", num_steps=num_steps)
    report_progress(stage, 0)
    if sound.layers < model.num_layers:
        _run_from(model, tokens, directory, sound.layers, lambda index: report_progress(stage, sizes[index]), each)
    states = states_directory(directory)
    for path in states.iterdir():
        path.unlink()
    states.rmdir()


def _run_from(
    model: StreamedModel, tokens: Tokens, directory: Path, done: int, report: Callable[[int], None], each: RunLayer
) -> None:
    states = begin_states(model, tokens, directory=states_directory(directory), layer=done)
    for layer in model.layers(done):
        each(layer, states)
        add_layer(directory, layer.index)
        report(layer.index)
        del layer  # before the one after the next is loaded
