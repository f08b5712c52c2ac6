"""The output directory appears whole or not at all, whoever else works beside it."""

import errno
import fcntl
import os
import signal
import time
from pathlib import Path

import pytest

from quantkit.checkpoint import disk, locks
from quantkit.checkpoint import output as module
from quantkit.checkpoint.output import WORK_NAME, OutputDirectory, check_target
from quantkit.errors import ResourceError, UsageError


def fill(directory: Path) -> None:
    (directory / "sub").mkdir()
    for name in ("a.bin", "sub/b.txt", "conversion.json"):
        (directory / name).write_text(name)


def test_every_file_and_folder_is_flushed_before_the_one_rename(tmp_path, monkeypatch):
    flushed: list[str] = []
    for place in (module, disk):
        monkeypatch.setattr(place, "flush", lambda path: flushed.append(path.name))
    rename = Path.rename

    def renamed(self, target):
        if target == tmp_path / "out":
            assert set(flushed) - {".quantkit", tmp_path.name} == {
                "a.bin",
                "b.txt",
                "conversion.json",
                "sub",
                "out.partial",
            }
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", renamed)
    with OutputDirectory(tmp_path / "out") as output:
        fill(output.directory)
        assert not (tmp_path / "out").exists()
        output.put_in_place()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.bin", "conversion.json", "sub"]
    assert flushed[-2:] == [tmp_path.name, "out"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_error_leaves_nothing_and_no_new_parents(tmp_path):
    with pytest.raises(ZeroDivisionError), OutputDirectory(tmp_path / "x" / "y" / "out") as output:
        fill(output.directory)
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_an_error_before_the_work_leaves_nothing(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    with pytest.raises(ResourceError, match="No space"), OutputDirectory(tmp_path / "x" / "out"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_is_refused_and_leaves_the_first_alone(tmp_path):
    with OutputDirectory(tmp_path / "out") as first:
        fill(first.directory)
        with pytest.raises(UsageError, match="another run"), OutputDirectory(tmp_path / "out"):
            pass
        assert (first.directory / "a.bin").read_text() == "a.bin"
        first.put_in_place()
    assert (tmp_path / "out" / "sub" / "b.txt").is_file()


def test_clean_up_of_one_run_spares_what_another_then_makes(tmp_path, monkeypatch):
    """The first run fails while a second waits to take over: its clean-up ends before the second may begin."""
    events: list[str] = []
    rmtree, close = module.shutil.rmtree, os.close
    with pytest.raises(ZeroDivisionError), OutputDirectory(tmp_path / "out") as output:
        (lock,) = output._locks
        monkeypatch.setattr(module.shutil, "rmtree", lambda *a, **k: (events.append("remove"), rmtree(*a, **k))[1])
        monkeypatch.setattr(
            module.os, "close", lambda fd: (events.append("unlock") if fd == lock else None, close(fd))[1]
        )
        raise ZeroDivisionError
    assert set(events[:-1]) == {"remove"}
    assert events[-1] == "unlock"


@pytest.mark.parametrize("mark", [WORK_NAME, f"{WORK_NAME}.done"])
def test_a_renaming_that_was_cut_is_finished(mark, tmp_path):
    """Renamed, and what is no output still in it; every other point of a kill is in tests/convert/test_resume.py."""
    fill_in_place(tmp_path, mark)
    with pytest.raises(UsageError, match="exists already"):
        check_target(tmp_path / "out", None)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.bin", "conversion.json", "sub"]


def fill_in_place(tmp_path, mark=WORK_NAME):
    (tmp_path / "out" / mark).mkdir(parents=True)
    (tmp_path / "out" / mark / "run.json").write_text("{}")
    fill(tmp_path / "out")


def test_a_renaming_that_goes_on_elsewhere_is_left_alone(tmp_path):
    fill_in_place(tmp_path)
    lock = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(UsageError, match="exists already"):
        check_target(tmp_path / "out", None)
    os.close(lock)
    assert (tmp_path / "out" / WORK_NAME / "run.json").is_file()


@pytest.mark.parametrize("lacks", ["run.json", "conversion.json", "mark"])
def test_a_directory_of_somebody_else_is_left_alone(lacks, tmp_path):
    fill_in_place(tmp_path)
    if lacks == "run.json":
        (tmp_path / "out" / WORK_NAME / "run.json").unlink()
    elif lacks == "conversion.json":
        (tmp_path / "out" / "conversion.json").unlink()
    else:
        (tmp_path / "out" / WORK_NAME).rename(tmp_path / "elsewhere")
        (tmp_path / "out" / WORK_NAME).symlink_to(tmp_path / "elsewhere")
    before = sorted(path for path in tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="exists already"):
        check_target(tmp_path / "out", None)
    assert sorted(path for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("source", ["out.partial", "out.partial/source", "."])
def test_a_source_in_the_way_is_refused(source, tmp_path):
    (tmp_path / source / WORK_NAME).mkdir(parents=True)
    with pytest.raises(UsageError, match="overlaps the source"):
        check_target(tmp_path / "out", tmp_path / source)
    assert (tmp_path / source / WORK_NAME).is_dir()


def test_work_behind_a_link_is_not_ours(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out.partial" / WORK_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="is not ours"), OutputDirectory(tmp_path / "out"):
        pass
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_signal_while_renaming_comes_too_late(tmp_path, monkeypatch):
    """By whichever thread the kernel gives it."""
    rename = Path.rename

    def renamed(self, target):
        result = rename(self, target)
        if target == tmp_path / "out":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        return result

    monkeypatch.setattr(Path, "rename", renamed)
    before = signal.getsignal(signal.SIGINT)
    with OutputDirectory(tmp_path / "out") as output:
        fill(output.directory)
        output.put_in_place()
    assert signal.getsignal(signal.SIGINT) is before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.bin", "conversion.json", "sub"]


def test_ranks_share_a_directory_and_a_rank_is_one_process(tmp_path):
    with OutputDirectory(tmp_path / "out", rank=0) as first, OutputDirectory(tmp_path / "out", rank=1) as second:
        assert first.directory == second.directory
        for rank in (1, None):
            with pytest.raises(UsageError, match="another run"), OutputDirectory(tmp_path / "out", rank=rank):
                pass
    assert (tmp_path / "out.partial").is_dir()  # ranks leave what others may need


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    with pytest.raises(ResourceError, match="cannot be locked") as caught, OutputDirectory(tmp_path / "out"):
        pass
    assert "with locks" in caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_cannot_rename_is_said_before_the_work(tmp_path, monkeypatch):
    def refuse(self: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(ResourceError, match="cannot rename directories") as caught, OutputDirectory(tmp_path / "out"):
        pass
    assert "copy the output there" in caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_target_that_appears_meanwhile_is_not_replaced(tmp_path):
    with pytest.raises(UsageError, match="appeared"), OutputDirectory(tmp_path / "out") as output:
        fill(output.directory)
        (tmp_path / "out").mkdir()
        output.put_in_place()
    assert list((tmp_path / "out").iterdir()) == []
    assert (tmp_path / "out.partial" / "a.bin").is_file()  # finished work, to be put in place when the way is free
