"""Words on their way into an output: what is written is read in rows, and nothing else is believed."""

import os

import numpy as np
import pytest
from safetensors.torch import load_file

from quantkit.errors import SourceError
from quantkit.numerics.packing import Int4Words, pack_int4
from quantkit.words import finish_words, open_words, write_words

ONE, TWO = "model.layers.3.mlp.experts.0.up_proj", "model.layers.3.mlp.experts.1.up_proj"
SHAPES = {ONE: (16, 64), TWO: (8, 64)}
RUN = {"method": "gptq", "tokens": "abc"}


def words_of(seed, num_rows):
    rng = np.random.default_rng(seed)
    codes_RC = rng.integers(-8, 8, (num_rows, 64)).astype(np.int8)
    scale_RG = (np.array([0x3C00, 0xBC10], np.uint16))[rng.integers(0, 2, (num_rows, 2))]
    return Int4Words(pack_int4(codes_RC), scale_RG)


def write(directory, *, searched=(), change=None):
    directory.mkdir()
    with write_words(directory / "layer-3.safetensors", SHAPES, group_size=32) as writer:
        for seed, (module, (num_rows, _)) in enumerate(SHAPES.items()):
            words = words_of(seed, num_rows)
            if change is not None:
                words = change(words)
            writer.add(module, words)
        assert [path.name for path in directory.glob("*.safetensors")] == []  # not before it is whole
    finish_words(directory, RUN, searched=searched)
    return open_words(directory)


def test_rows_are_those_that_were_written(tmp_path):
    words = write(tmp_path / "words", searched=["model.layers.4.x"])
    expected = words_of(0, 16)
    got = words.read(ONE, 3, 9, signed=True)
    np.testing.assert_array_equal(got.packed, expected.packed[3:9])
    np.testing.assert_array_equal(got.scale, expected.scale[3:9])
    stored = load_file(tmp_path / "words" / "layer-3.safetensors")  # the library reads them too
    np.testing.assert_array_equal(stored[f"{ONE}.packed"].numpy(), expected.packed)
    assert words.modules == set(SHAPES)
    assert words.searched == {"model.layers.4.x"}
    assert words.summary["num_calibrated"] == 2
    assert words.summary["num_searched"] == 1


def test_the_hash_is_of_words_and_document(tmp_path):
    first = write(tmp_path / "one").sha256
    assert write(tmp_path / "two").sha256 == first
    assert write(tmp_path / "three", searched=["x"]).sha256 != first
    assert write(tmp_path / "four", change=lambda one: one._replace(packed=one.packed ^ 1)).sha256 != first


@pytest.mark.parametrize(("bits", "signed"), [(0x7FC0, True), (0x7F80, True), (0, True), (0xBC00, False)])
def test_a_scale_that_cannot_be_is_refused_by_module_row_and_group(tmp_path, bits, signed):
    def spoil(words):
        scale = np.full_like(words.scale, 0x3C00)
        scale[5, 1] = bits
        return words._replace(scale=scale)

    words = write(tmp_path / "words", change=spoil)
    words.read(ONE, 0, 5, signed=signed)
    with pytest.raises(SourceError, match="row 5, group 1") as caught:
        words.read(ONE, 4, 8, signed=signed)
    assert caught.value.tensor == ONE


def test_modules_and_shapes_must_be_those_of_the_plan(tmp_path):
    words = write(tmp_path / "words", searched=["model.layers.4.x"])
    good = {**SHAPES, "model.layers.4.x": (8, 64)}
    words.check_modules(good, group_size=32)
    for shapes, message in (
        (SHAPES | {"model.y": (8, 64)}, "no words of model.y"),
        ({ONE: (16, 64)}, f"words of {TWO}, which is not INT4"),
        (good | {TWO: (8, 128)}, r"the weight is \[8, 128\]"),
    ):
        with pytest.raises(SourceError, match=message):
            words.check_modules(shapes, group_size=32)
    with pytest.raises(SourceError, match="in groups of 64"):
        words.check_modules(good, group_size=64)


def test_a_file_more_or_less_is_refused(tmp_path):
    write(tmp_path / "words")
    path = tmp_path / "words" / "layer-3.safetensors"
    os.link(path, tmp_path / "words" / "layer-4.safetensors")
    with pytest.raises(SourceError, match="other files"):
        open_words(tmp_path / "words")
    (tmp_path / "words" / "layer-4.safetensors").unlink()
    open_words(tmp_path / "words")
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(SourceError, match="other files"):
        open_words(tmp_path / "words")


@pytest.mark.parametrize("place", [-1, 200, None])
def test_a_file_that_is_not_what_it_was_is_refused_by_its_hash(tmp_path, place):
    words = write(tmp_path / "words")
    words.check_files()
    path = tmp_path / "words" / "layer-3.safetensors"
    if place is None:
        path.rename(tmp_path / "copy")
        path.symlink_to(tmp_path / "copy")
    else:
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        path.write_bytes(content)
    with pytest.raises(SourceError, match=r"not what it was.*--no-resume") as caught:
        words.check_files()
    assert caught.value.file == str(path)


def test_a_file_that_is_broken_off_leaves_nothing(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        write_words(tmp_path / "layer-3.safetensors", SHAPES, group_size=32) as writer,
    ):
        writer.add(ONE, words_of(0, 16))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
