"""Directories of runs: whose they are, what is told of another run, and that two never work in one."""

import json

import pytest

from quantkit.checkpoint.begun import BEGUN_NAME, differences, run_directory
from quantkit.checkpoint.disk import remove
from quantkit.errors import SourceError, UsageError

RUN = {"tokens": "0" * 64, "options": {"dtype": "float32"}}


def begin(directory, document=RUN, *, resume=True):
    with run_directory(directory, document, resume=resume):
        return sorted(path.name for path in directory.iterdir())


def test_a_run_that_was_cut_before_it_had_begun_begins(tmp_path):
    for left in ((), (f"{BEGUN_NAME}.draft",)):
        directory = tmp_path / f"run-{len(left)}"
        directory.mkdir()
        for name in left:
            (directory / name).write_text("{")
        assert begin(directory) == [BEGUN_NAME]
        assert json.loads((directory / BEGUN_NAME).read_text()) == RUN


def test_a_run_goes_on_with_what_it_left_or_begins_anew(tmp_path):
    begin(tmp_path / "run")
    (tmp_path / "run" / "layer-0").write_bytes(b"done")
    assert begin(tmp_path / "run") == [BEGUN_NAME, "layer-0"]
    other = RUN | {"tokens": "1" * 64}
    with pytest.raises(UsageError, match="tokens has changed"):
        begin(tmp_path / "run", other)
    assert begin(tmp_path / "run", other, resume=False) == [BEGUN_NAME]
    assert json.loads((tmp_path / "run" / BEGUN_NAME).read_text()) == other


def test_what_differs_is_told_and_hashes_only_where_asked(tmp_path):
    begin(tmp_path / "run")
    with pytest.raises(UsageError, match=r"options\.dtype was .float32. and is .bfloat16.; tokens has changed;"):
        begin(tmp_path / "run", {"tokens": "1" * 64, "options": {"dtype": "bfloat16"}})
    assert list(differences({"a": "0" * 64}, {"a": "x"}, ("a",))) == [f'a was "{"0" * 64}" and is "x"']
    assert list(differences({"a": 1}, {"b": 1})) == ["a is no longer there", "b is new"]


@pytest.mark.parametrize("content", ["[]", "", "{"])
def test_a_document_that_is_none_is_an_error_and_can_be_thrown_away(tmp_path, content):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / BEGUN_NAME).write_text(content)
    with pytest.raises(SourceError, match="is not"):
        begin(tmp_path / "run")
    begin(tmp_path / "run", resume=False)
    begin(tmp_path / "run")


@pytest.mark.parametrize("resume", [True, False])
def test_what_is_somebody_elses_is_left_alone(tmp_path, resume):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "mine").touch()
    (tmp_path / "file").touch()
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / BEGUN_NAME).write_text(json.dumps(RUN))
    (tmp_path / "link").symlink_to(tmp_path / "ours")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("theirs", "file", "link", "dangling"):
        with pytest.raises(UsageError, match="not ours"):
            begin(tmp_path / name, resume=resume)
    assert (tmp_path / "theirs" / "mine").exists()
    assert (tmp_path / "ours" / BEGUN_NAME).exists()


def test_who_is_interrupted_is_told_what_is_kept(tmp_path):
    with pytest.raises(KeyboardInterrupt) as caught, run_directory(tmp_path / "run", RUN, resume=True):
        raise KeyboardInterrupt
    assert caught.value.__notes__ == [f"{tmp_path}/run: what is finished is kept there, and the same command goes on"]
    with pytest.raises(KeyboardInterrupt) as caught, run_directory(tmp_path / "run", RUN, resume=True):
        remove(tmp_path / "run")
        raise KeyboardInterrupt
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("resume", [True, False])
def test_a_second_run_is_refused_while_the_first_one_works(tmp_path, resume):
    with run_directory(tmp_path / "run", RUN, resume=True):
        (tmp_path / "run" / "layer-0").write_bytes(b"done")
        with pytest.raises(UsageError, match="is being written by another run"):
            begin(tmp_path / "run", resume=resume)
        assert (tmp_path / "run" / "layer-0").exists()
        remove(tmp_path / "run")
    assert begin(tmp_path / "run") == [BEGUN_NAME]  # nothing is left of the lock
