"""The output directory appears whole or not at all, whoever else works beside it."""

import os
from pathlib import Path

import pytest

from quantkit.checkpoint import output as module
from quantkit.checkpoint.output import OutputDirectory
from quantkit.errors import ResourceError, UsageError


def fill(directory: Path) -> None:
    (directory / "sub").mkdir()
    for name in ("a.bin", "sub/b.txt", "conversion.json"):
        (directory / name).write_text(name)


def test_every_file_and_folder_is_flushed_before_the_one_rename(tmp_path, monkeypatch):
    flushed: list[str] = []
    monkeypatch.setattr(module, "flush", lambda path: flushed.append(path.name))
    rename = Path.rename

    def renamed(self, target):
        assert set(flushed) - {".quantkit-partial"} == {"a.bin", "b.txt", "conversion.json", "sub", "out.partial"}
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", renamed)
    with OutputDirectory(tmp_path / "out") as output:
        fill(output.directory)
        assert not (tmp_path / "out").exists()
        output.publish()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.bin", "conversion.json", "sub"]
    assert flushed[-1] == tmp_path.name
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_error_leaves_nothing_and_no_new_parents(tmp_path):
    with pytest.raises(ZeroDivisionError), OutputDirectory(tmp_path / "x" / "y" / "out") as output:
        fill(output.directory)
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_an_error_before_the_work_leaves_nothing(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.fcntl, "flock", refuse)
    with pytest.raises(ResourceError, match="No space"), OutputDirectory(tmp_path / "x" / "out"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_is_refused_and_leaves_the_first_alone(tmp_path):
    with OutputDirectory(tmp_path / "out") as first:
        fill(first.directory)
        with pytest.raises(UsageError, match="another run"), OutputDirectory(tmp_path / "out"):
            pass
        assert (first.directory / "a.bin").read_text() == "a.bin"
        first.publish()
    assert (tmp_path / "out" / "sub" / "b.txt").is_file()


def test_clean_up_of_one_run_spares_what_another_then_makes(tmp_path, monkeypatch):
    """The first run fails while a second waits to take over: its clean-up ends before the second may begin."""
    events: list[str] = []
    rmtree, close = module.shutil.rmtree, os.close
    monkeypatch.setattr(module.shutil, "rmtree", lambda *a, **k: (events.append("remove"), rmtree(*a, **k))[1])
    with pytest.raises(ZeroDivisionError), OutputDirectory(tmp_path / "out") as output:
        lock = output._lock
        monkeypatch.setattr(
            module.os, "close", lambda fd: (events.append("unlock") if fd == lock else None, close(fd))[1]
        )
        raise ZeroDivisionError
    assert events == ["remove", "unlock"]


@pytest.mark.parametrize("stage", ["unlink", "flush", "rename"])
def test_a_kill_while_publishing_is_recovered_by_the_next_run(stage, tmp_path):
    """In a child process that dies by SIGKILL inside publish."""
    child = os.fork()
    if child == 0:  # pragma: no cover
        die = lambda *_, **__: os.kill(os.getpid(), 9)  # noqa: E731
        with OutputDirectory(tmp_path / "out") as output:
            fill(output.directory)
            if stage == "unlink":
                Path.unlink = die
            elif stage == "flush":
                module.flush = die
            else:
                Path.rename = die
            output.publish()
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == 9
    if stage == "unlink":  # behind the rename: published, whole, with our mark still in it
        names = {path.name for path in (tmp_path / "out").iterdir()}
        assert names == {"a.bin", "sub", "conversion.json", ".quantkit-partial"}
        return
    assert not (tmp_path / "out").exists()
    with OutputDirectory(tmp_path / "out") as output:
        fill(output.directory)
        output.publish()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_target_that_appears_meanwhile_is_not_replaced(tmp_path):
    with pytest.raises(UsageError, match="appeared"), OutputDirectory(tmp_path / "out") as output:
        fill(output.directory)
        (tmp_path / "out").mkdir()
        output.publish()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
