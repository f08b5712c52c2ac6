"""Directories of runs: whose they are, what is told of another run, and that two never work in one."""

import json

import pytest

from quantkit.checkpoint.begun import differences, remove_left, run_directory
from quantkit.checkpoint.disk import draft_of, remove
from quantkit.checkpoint.file_names import BEGUN_NAME
from quantkit.errors import SourceError, UsageError

RUN = {"tokens": "0" * 64, "options": {"dtype": "float32"}}


def working(directory, *, resume=True, is_worth=True):
    return run_directory(directory, RUN, resume=resume, has_work=lambda _: is_worth)


def begin(directory, document=RUN, *, resume=True):
    with run_directory(directory, document, resume=resume, has_work=lambda _: True):
        return sorted(path.name for path in directory.iterdir())


def test_a_run_that_was_cut_before_it_had_begun_begins(tmp_path):
    for is_begun in (False, True):
        directory = tmp_path / f"run-{is_begun}"
        directory.mkdir()
        if is_begun:
            draft_of(directory / BEGUN_NAME).write_text("{")
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
    with pytest.raises(KeyboardInterrupt) as caught, working(tmp_path / "run"):
        raise KeyboardInterrupt
    assert caught.value.__notes__ == [f"{tmp_path}/run: what is finished is kept there, and the same command goes on"]
    with pytest.raises(KeyboardInterrupt) as caught, working(tmp_path / "run"):
        remove(tmp_path / "run")
        raise KeyboardInterrupt
    assert not hasattr(caught.value, "__notes__")


def test_who_has_a_bad_source_is_not_told_that_the_same_command_goes_on_behind_its_repair(tmp_path):
    with pytest.raises(SourceError) as caught, working(tmp_path / "run"):
        raise SourceError("holds nan", remedy="download it again")
    assert caught.value.__notes__ == [
        f"{tmp_path}/run: what is finished is kept there, and the same command goes on with the source as it is; "
        "behind a repair, give --no-resume to begin anew"
    ]


@pytest.mark.parametrize("resume", [True, False])
def test_a_second_run_is_refused_while_the_first_one_works(tmp_path, resume):
    with working(tmp_path / "run"):
        (tmp_path / "run" / "layer-0").write_bytes(b"done")
        with pytest.raises(UsageError, match="is being written by another run"):
            begin(tmp_path / "run", resume=resume)
        assert (tmp_path / "run" / "layer-0").exists()
        remove(tmp_path / "run")
    assert begin(tmp_path / "run") == [BEGUN_NAME]  # nothing is left of the lock


@pytest.mark.parametrize("error", [KeyboardInterrupt, UsageError("no"), AssertionError])
def test_nothing_is_left_of_a_run_that_has_finished_nothing(tmp_path, error):
    """Nor of directories that were made for it; where something is finished all of it stays."""
    directory = tmp_path / "new" / "deep" / "run"
    for is_worth in (False, True, False):  # the last finds what was left
        with pytest.raises(BaseException), working(directory, is_worth=is_worth):  # noqa: B017, PT011
            (directory / "draft").touch()
            (directory / "states").mkdir(exist_ok=True)
            raise error
        assert directory.exists() == is_worth
        assert (tmp_path / "new").exists() == is_worth or directory.parent.exists()
    assert not directory.exists()


def test_what_a_finished_run_has_left_goes_and_nothing_else(tmp_path):
    begin(tmp_path / "used")
    (tmp_path / "used" / "layer-0").touch()
    remove_left(tmp_path / "used", lambda begun: begun != RUN)
    assert (tmp_path / "used" / "layer-0").exists()
    with working(tmp_path / "used"):  # it is worked in
        remove_left(tmp_path / "used", lambda begun: begun == RUN)
    assert (tmp_path / "used" / "layer-0").exists()
    (tmp_path / "link").symlink_to(tmp_path / "used")
    (tmp_path / "file").touch()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "mine").touch()
    (tmp_path / "garbled").mkdir()
    (tmp_path / "garbled" / BEGUN_NAME).write_text("[]")
    (tmp_path / "empty").mkdir()  # cut behind the last file of it
    before = {path for path in tmp_path.rglob("*") if path.name != "empty"}
    for name in ("link", "file", "theirs", "garbled", "empty", "nowhere"):
        remove_left(tmp_path / name, lambda _: True)
    assert set(tmp_path.rglob("*")) == before
    remove_left(tmp_path / "used", lambda begun: begun == RUN)
    assert not (tmp_path / "used").exists()
