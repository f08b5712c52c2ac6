"""Files of layers, in which a run is found again: what is not as it was is not believed."""

import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from quantkit.streaming import Tokens
from quantkit.streaming.layer_files import run_layers
from quantkit.streaming.layer_journal import layer_file, layers_done
from tests.streaming.models import lively_checkpoint
from tests.streaming.test_forward import IDS, opened

TOKENS = Tokens(ids_NS=IDS.numpy())


class Run:
    """Of a model of three layers; the file of each holds the states behind it."""

    def __init__(self, source, tmp_path):
        self.model, self.work = opened(source), tmp_path / "work"
        self.work.mkdir()
        self.ran, self.stages = [], []

    def until(self, last=None):
        """Cut before that layer; in the middle of the one behind it, where ``last`` lies between two."""
        self.ran.clear()
        self.stages.clear()

        def each(layer, states):
            if layer.index == last:
                raise KeyboardInterrupt
            layer.run(states)
            if last is not None and layer.index > last:
                raise KeyboardInterrupt
            save_file({"states": states.hidden.numpy()}, layer_file(self.work, layer.index))
            self.ran.append(layer.index)

        def report(stage, done):
            self.stages.append((stage, done))

        run_layers(self.model, TOKENS, self.work, "try", report, each)

    def cut(self, last):
        with pytest.raises(KeyboardInterrupt):
            self.until(last)

    def files(self):
        return [layer_file(self.work, number).read_bytes() for number in range(3)]


def source_of(tmp_path_factory, model_type):
    source = tmp_path_factory.mktemp(model_type) / "source"
    lively_checkpoint(source, model_type, config_changes={"num_hidden_layers": 3})
    return source


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return source_of(tmp_path_factory, "glm4_moe")


@pytest.fixture
def run(source, tmp_path):
    return Run(source, tmp_path)


def test_a_run_goes_on_behind_the_last_file_and_leaves_files_alone(run):
    run.cut(2)
    assert run.ran == [0, 1]
    assert layers_done(run.work) == 2
    sizes = run.model.layer_bytes()
    assert [(stage.earlier_bytes, done) for stage, done in run.stages] == [(0, 0), (0, sizes[0]), (0, sizes[1])]
    run.until()
    assert run.ran == [2]
    earlier = sizes[0] + sizes[1]
    assert [(stage.earlier_bytes, done) for stage, done in run.stages] == [(earlier, 0), (earlier, sizes[2])]
    names = [layer_file(run.work, number).name for number in range(3)]
    assert sorted(path.name for path in run.work.iterdir()) == [*names, "layers.json"]
    run.until(0)  # cut behind the last layer: nothing is left to do
    assert run.ran == []


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut_short(path):
    os.truncate(path, path.stat().st_size - 1)


def fill_with_zeros(path):
    path.write_bytes(bytes(path.stat().st_size))


def link_to_a_copy(path):
    copy = path.with_name("copy")
    path.rename(copy)
    path.symlink_to(copy)


def remove(path):
    path.unlink()


@pytest.mark.parametrize("damage", [flip, cut_short, fill_with_zeros, link_to_a_copy, remove])
@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("layer-00000.safetensors", 0),
        ("layer-00001.safetensors", 1),  # the states that it began with are still there
        ("states/states-0.bin", 1),  # those behind layer 1
    ],
)
def test_what_is_damaged_is_made_again_and_said(run, damage, name, again):
    run.until()
    whole = run.files()
    (run.work / "layers.json").unlink()
    run.cut(2)
    assert run.ran == [0, 1]
    damage(run.work / name)
    run.until()
    assert run.ran == [0, 1, 2][again:]
    assert run.files() == whole
    label = run.stages[0][0].label
    assert label == f"try (again from layer {again}: {name.rpartition('/')[2]} was damaged)"


def test_states_that_an_interrupted_layer_has_overwritten_are_not_believed(run):
    """Layer 2 has begun, and writes where the states before layer 1 were."""
    run.until()
    whole = run.files()
    (run.work / "layers.json").unlink()
    run.cut(1.5)
    flip(run.work / "states" / "states-0.bin")
    run.until()
    assert run.ran == [0, 1, 2]
    assert run.files() == whole


def test_indices_that_are_handed_on_are_hashed_too(tmp_path, tmp_path_factory):
    run = Run(source_of(tmp_path_factory, "glm_moe_dsa"), tmp_path)
    run.cut(1.5)  # in the middle of a layer that hands on its own
    run.until()
    assert run.ran == [2]
    whole = run.files()
    (run.work / "layers.json").unlink()
    run.cut(2)
    fill_with_zeros(run.work / "states" / "carry-0.bin")
    run.until()
    assert run.ran == [1, 2]
    assert run.files() == whole


@pytest.mark.parametrize(
    "content", [None, b"", b"[]", b'{"layers": [{}]}', b'{"layers": [{"layer-00000.safetensors": 1}]}']
)
def test_without_a_journal_nothing_is_believed(run, content):
    run.cut(2)
    journal = run.work / "layers.json"
    journal.unlink()
    if content is not None:
        journal.write_bytes(content)
    assert layers_done(run.work) == 0
    run.until()
    assert run.ran == [0, 1, 2]
    assert run.stages[0][0].label == "try (again from layer 0: layers.json was damaged)"


def test_a_layer_that_was_cut_before_it_counted_is_made_again_without_a_word(run):
    run.cut(1)
    save_file({"states": np.zeros(3)}, layer_file(run.work, 1))
    run.until()
    assert run.ran == [1, 2]
    assert run.stages[0][0].label == "try"


def test_a_link_in_the_place_of_the_states_is_not_followed(run, tmp_path):
    run.cut(2)
    (run.work / "states").rename(tmp_path / "elsewhere")
    before = {path.name: path.read_bytes() for path in (tmp_path / "elsewhere").iterdir()}
    (run.work / "states").symlink_to(tmp_path / "elsewhere")
    run.until()
    assert run.ran == [0, 1, 2]
    assert {path.name: path.read_bytes() for path in (tmp_path / "elsewhere").iterdir()} == before
