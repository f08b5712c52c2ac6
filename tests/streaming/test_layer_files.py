"""Files of layers, in which a run is found again."""

import pytest

from quantkit.streaming import Tokens
from quantkit.streaming.layer_files import layer_file, layers_done, run_layers
from tests.streaming.models import lively_checkpoint
from tests.streaming.test_forward import IDS, opened


def test_layers_behind_a_gap_are_not_done(tmp_path):
    for number in (0, 1, 3):
        layer_file(tmp_path, number).touch()
    assert layers_done(tmp_path) == 2
    layer_file(tmp_path, 2).mkdir()  # no file
    assert layers_done(tmp_path) == 2


def test_a_run_goes_on_behind_the_last_file_and_leaves_files_alone(tmp_path):
    lively_checkpoint(tmp_path / "source", "glm4_moe", config_changes={"num_hidden_layers": 3})
    model, tokens, work = opened(tmp_path / "source"), Tokens(ids_NS=IDS.numpy()), tmp_path / "work"
    work.mkdir()
    ran, stages = [], []

    def run(last):
        def each(layer, states):
            if layer.index == last:
                raise KeyboardInterrupt
            layer.run(states)
            layer_file(work, layer.index).touch()
            ran.append(layer.index)

        run_layers(model, tokens, work, "try", lambda stage, done: stages.append((stage.earlier_bytes, done)), each)

    with pytest.raises(KeyboardInterrupt):
        run(last=2)
    run(last=None)
    assert ran == [0, 1, 2]
    sizes = model.layer_bytes()
    assert stages == [(0, 0), (0, sizes[0]), (0, sizes[1]), (sizes[0] + sizes[1], 0), (sizes[0] + sizes[1], sizes[2])]
    assert sorted(path.name for path in work.iterdir()) == [layer_file(work, number).name for number in range(3)]
    run(last=0)  # cut behind the last layer: nothing is left to do
    assert ran == [0, 1, 2]
