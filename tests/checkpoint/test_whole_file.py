"""A file that is there whole or not at all, and never in the place of another."""

from contextlib import nullcontext

import numpy as np
import pytest
from safetensors.numpy import load_file

from quantkit.checkpoint.disk import draft_of, write_whole
from quantkit.checkpoint.whole_file import check_new_file, whole_shard
from quantkit.errors import UsageError
from quantkit.tensors import F32, I64, TensorSpec

SPECS = {"b": TensorSpec(F32, (2,)), "a": TensorSpec(F32, (1,)), "c": TensorSpec(I64, ())}
ARRAYS = {"b": np.array([1, 2], np.float32), "a": np.array([3], np.float32), "c": np.array(7, np.int64)}


def write(path, *, names=SPECS):
    with whole_shard(path, SPECS) as writer:
        assert list(writer.specs) == ["c", "a", "b"]  # widest first
        for name in names:
            writer.write(name, ARRAYS[name])
        assert not path.exists()


def test_a_file_has_its_name_when_it_is_whole(tmp_path):
    path = tmp_path / "one.safetensors"
    draft_of(path).write_bytes(b"of a run that was cut")
    write(path)
    assert {name: array.tolist() for name, array in load_file(path).items()} == {"a": [3], "b": [1, 2], "c": 7}
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("names", [SPECS, ["a"]])
def test_what_others_have_beside_it_is_left_alone(tmp_path, names):
    path = tmp_path / "one.safetensors"
    (tmp_path / "one.safetensors.draft").write_bytes(b"precious")
    with nullcontext() if names is SPECS else pytest.raises(AssertionError):
        write(path, names=names)
    (tmp_path / "two.draft").write_bytes(b"precious")
    write_whole(tmp_path / "two", b"2")
    assert {one.name for one in tmp_path.iterdir()} - {path.name} == {"one.safetensors.draft", "two.draft", "two"}
    assert {one.read_bytes() for one in tmp_path.glob("*.draft")} == {b"precious"}


def test_what_is_broken_off_or_not_whole_leaves_nothing(tmp_path):
    with pytest.raises(AssertionError, match="b: written"):
        write(tmp_path / "one.safetensors", names=["a", "c"])
    with pytest.raises(KeyError):
        write(tmp_path / "one.safetensors", names=["a", "nothing"])
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere/one\.safetensors.*cannot be written"):
        write(tmp_path / "nowhere" / "one.safetensors")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("file", "exists already"),
        ("folder", "exists already"),
        ("link", "exists already"),
        ("circle", "exists already"),
        ("source/new", "lies in the source"),
        ("source/folder/new", "lies in the source"),
        ("to_source/new", "lies in the source"),
        ("x" * 256, "cannot be an output"),
    ],
)
def test_places_that_are_none(tmp_path, name, words):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "source" / "folder").mkdir(parents=True)
    (tmp_path / "to_source").symlink_to(tmp_path / "source")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(UsageError, match=words) as caught:
        check_new_file(tmp_path / name, outside=tmp_path / "source")
    assert caught.value.file == str(tmp_path / name)


def test_other_places_are_taken(tmp_path):
    (tmp_path / "source").mkdir()
    check_new_file(tmp_path / "source-new", outside=tmp_path / "source")
    check_new_file(tmp_path / "source" / "new")
    check_new_file(tmp_path / "no" / "folder" / "new", outside=tmp_path / "source")
