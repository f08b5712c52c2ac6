"""A conversion that was stopped goes on from what it has finished, and ends with the same bytes."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import torch

from quantkit.checkpoint.output import WORK_NAME
from quantkit.convert import convert as convert_module
from quantkit.convert import journal, local
from quantkit.convert.conversion import Conversion
from quantkit.errors import ResourceError, SourceError, UsageError
from quantkit.plan.make import make_plan
from quantkit.sources import resolve_source
from tests.convert.faults import ERRNOS, WRITES, Faults, die_before, fail_with, some_calls, some_kills, write_short
from tests.convert.helpers import convert, directory_bytes

NO_FAULT = -1


@pytest.fixture
def source(tiny_checkpoint):
    """Four small shards and a file beside them."""
    made = tiny_checkpoint(num_shards=4)
    (made.directory / "chat_template.jinja").write_text("{{ x }}")
    return made


@pytest.fixture
def golden(source, tmp_path):
    """What an undisturbed run makes of it."""
    convert(source.directory, tmp_path / "golden")
    return directory_bytes(tmp_path / "golden")


@pytest.fixture
def small_source(tiny_checkpoint, tmp_path):
    """Of the least work: one layer in two shards; and what an undisturbed run makes of it."""
    made = tiny_checkpoint("small", config_changes={"num_hidden_layers": 2, "n_routed_experts": 1})
    convert(made.directory, tmp_path / "golden")
    return made, directory_bytes(tmp_path / "golden")


def count_calls(source, tmp_path, *, removals=False):
    """The calls of an undisturbed run that change something, in a place of their own."""
    root = tmp_path / "counted"
    root.mkdir()
    faults = Faults(root, removals=removals)
    with faults.injected(fail_with(0), NO_FAULT):
        convert(source.directory, root / "out", num_jobs=1)
    shutil.rmtree(root)
    return faults.calls


def in_a_child(run):
    """Run in a process of its own; the signal that killed it, or 0."""
    child = os.fork()
    if child == 0:  # pragma: no cover
        with suppress(BaseException):
            run()
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed otherwise"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def stop_after(source, target, num_shards, error=KeyboardInterrupt):
    """A run that ends early, with at least so many shards finished."""
    original = journal.Journal.add_output
    finished = []

    def add_output(recorder, name, entry):
        original(recorder, name, entry)
        finished.append(name)
        if len(finished) == num_shards:
            raise error

    with pytest.MonkeyPatch.context() as patch, pytest.raises(error) as caught:
        patch.setattr(journal.Journal, "add_output", add_output)
        convert(source.directory, target, num_jobs=1)
    return finished, caught.value


def attempt(source, target):
    """What a conversion ends with: nothing, or the error of a disk."""
    try:
        convert(source.directory, target, num_jobs=1)
    except ResourceError as error:
        return error
    return None


def is_in_place(target):
    return target.exists() and not any((target / name).exists() for name in (WORK_NAME, f"{WORK_NAME}.done"))


def partial(tmp_path):
    return tmp_path / "out.partial"


def test_finished_shards_are_kept_and_not_made_again(source, golden, tmp_path):
    finished, error = stop_after(source, tmp_path / "out", 2)
    kept = {path.name: path.stat().st_mtime_ns for path in partial(tmp_path).glob("*.safetensors")}
    assert set(kept) == set(finished)
    assert not (tmp_path / "out").exists()
    assert error.__notes__ == [
        f"2 of 4 shards are done and kept in {partial(tmp_path)}: the same command goes on from there"
    ]
    convert(source.directory, tmp_path / "out")
    assert directory_bytes(tmp_path / "out") == golden
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in kept} == kept
    assert {path.name for path in tmp_path.iterdir()} == {"source", "golden", "out"}


def test_progress_tells_finished_work_from_what_is_made_now(source, tmp_path):
    """Each stage by its name; what an earlier run has done counts for how far it is, and not for how fast."""
    stop_after(source, tmp_path / "out", 2)
    told = []
    resolved = resolve_source(str(source.directory))
    plan = make_plan(resolved.recipe, resolved.family, resolved.checkpoint)
    conversion = Conversion(
        plan=plan, target=tmp_path / "out", num_jobs=1, report_progress=lambda *report: told.append(report)
    )
    report = convert_module.convert_checkpoint(conversion)
    stages = list(dict.fromkeys(stage for stage, _ in told))
    assert [stage.label for stage in stages] == ["check finished work", "convert"]
    for stage in stages:
        reported = [done for one, done in told if one == stage]
        assert reported[0] == 0
        assert stage.earlier_bytes + sum(reported) == stage.total_bytes
    check, made = stages
    assert check.earlier_bytes == 0
    assert 0 < made.earlier_bytes < made.total_bytes
    assert report.earlier_bytes == made.earlier_bytes


def test_every_call_may_be_the_last(small_source, tmp_path):
    """Killed at a call that changes something: before it and in its middle, the last rename too."""
    source, golden = small_source
    calls = count_calls(source, tmp_path, removals=True)
    assert len(calls) > 60
    assert sum("rename" in call for call in calls) >= 4  # the run's document, the probe, putting in place twice
    for at, fault in some_kills(calls):
        root = tmp_path / f"{at}-{fault.__name__}"
        root.mkdir()
        faults = Faults(root, removals=True)

        def run(root=root, faults=faults, fault=fault, at=at):
            with faults.injected(fault, at):
                convert(source.directory, root / "out", num_jobs=1)

        assert in_a_child(run) == signal.SIGKILL, calls[at]
        if (root / "out").exists():
            with pytest.raises(UsageError, match="exists already"):  # in place, and nothing is left to do
                convert(source.directory, root / "out")
        else:
            convert(source.directory, root / "out")
        assert directory_bytes(root / "out") == golden, (calls[at], fault.__name__)
        assert [path.name for path in root.iterdir()] == ["out"], (calls[at], fault.__name__)
        shutil.rmtree(root)


def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bytes(source, golden, tmp_path):
    """Twenty kills at random moments (``QUANTKIT_KILLS`` asks for more), each in the work that the last one left."""
    chance, num_kills = random.Random(20261129), 0
    wanted = int(os.environ.get("QUANTKIT_KILLS", "20"))
    for _ in range(5 * wanted):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        child = os.fork()
        if child == 0:  # pragma: no cover
            with suppress(BaseException):
                convert(source.directory, tmp_path / "out")
            os._exit(0)
        time.sleep(chance.uniform(0.0, 0.25))
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        num_kills += os.WIFSIGNALED(status)
        if num_kills >= wanted:
            break
    assert num_kills >= wanted
    if not (tmp_path / "out").exists():
        convert(source.directory, tmp_path / "out")
    assert directory_bytes(tmp_path / "out") == golden


@pytest.mark.parametrize("kind", ["full", "broken", "short"])
def test_every_call_may_fail(kind, small_source, tmp_path):
    """An error with a name, no output, and the same command goes on; a short write is none at all."""
    source, golden = small_source
    calls = count_calls(source, tmp_path)
    fault = write_short if kind == "short" else fail_with(ERRNOS[kind])
    tried, num_failed = some_calls(calls), 0
    if kind == "short":  # anything else is done as ever
        tried = [at for at in tried if calls[at].split()[0] in WRITES]
    for at in tried:
        call = calls[at]
        root = tmp_path / str(at)
        root.mkdir()
        with Faults(root).injected(fault, at):
            error = attempt(source, root / "out")
        if error is not None:
            num_failed += 1
            assert os.strerror(ERRNOS[kind]) in str(error), call
            assert error.remedy, call
        if not (root / "out").exists():  # one behind the rename is an error, too
            convert(source.directory, root / "out")
        elif not is_in_place(root / "out"):
            with pytest.raises(UsageError, match="exists already"):
                convert(source.directory, root / "out")
        assert directory_bytes(root / "out") == golden, call
        assert [path.name for path in root.iterdir()] == ["out"], call
        shutil.rmtree(root)
    assert len(tried) > (15 if kind == "short" else 60)
    assert num_failed == (0 if kind == "short" else len(tried) - 1)  # the last flush has its output in place


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group_size": 64}, "recipe.group_size was 32 and is 64"),
        ({"scales": "absmax"}, 'recipe.scales was "search" and is "absmax"'),
        ({"ignore": ("re:.*experts.*",), "allow_unmatched": True}, "recipe.rules"),
    ],
)
def test_another_recipe_is_refused_and_the_difference_named(changes, words, source, golden, tmp_path):
    stop_after(source, tmp_path / "out", 2)
    before = directory_bytes(partial(tmp_path))
    with pytest.raises(UsageError) as caught:
        convert(source.directory, tmp_path / "out", **changes)
    assert words in str(caught.value)
    assert "outputs." not in caught.value.message  # what follows from it
    assert caught.value.remedy.endswith("to start over, give --no-resume")
    assert not hasattr(caught.value, "__notes__")
    assert directory_bytes(partial(tmp_path)) == before
    convert(source.directory, tmp_path / "out")
    assert directory_bytes(tmp_path / "out") == golden


def test_another_version_is_refused(source, tmp_path, monkeypatch):
    stop_after(source, tmp_path / "out", 1)
    monkeypatch.setattr("quantkit.convert.run.__version__", "9.9")
    with pytest.raises(UsageError, match=re.escape('version was "0.1.0" and is "9.9"')):
        convert(source.directory, tmp_path / "out")


def test_another_config_or_another_tensor_is_refused(source, tmp_path):
    stop_after(source, tmp_path / "out", 1)
    config = json.loads((source.directory / "config.json").read_text())
    (source.directory / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    with pytest.raises(UsageError, match=re.escape("source.config has changed")):
        convert(source.directory, tmp_path / "out")
    (source.directory / "config.json").write_text(json.dumps(config))
    (source.directory / "chat_template.jinja").write_text("{{ another }}")
    with pytest.raises(UsageError, match=re.escape("source.sidecars has changed")):
        convert(source.directory, tmp_path / "out")


def test_a_changed_byte_of_a_finished_source_is_refused(source, golden, tmp_path):
    finished, _ = stop_after(source, tmp_path / "out", 2)
    path = source.directory / finished[0]
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UsageError, match="has changed, or may have, since") as caught:
        convert(source.directory, tmp_path / "out")
    assert caught.value.file == finished[0]
    assert partial(tmp_path).is_dir()
    path.write_bytes(content)  # with another time: it is hashed, and is the same
    convert(source.directory, tmp_path / "out")
    assert directory_bytes(tmp_path / "out") == golden


def test_a_source_that_is_repaired_is_gone_on_from(tiny_checkpoint, tmp_path):
    """One bad shard: what was finished before it is not made again."""
    source = tiny_checkpoint(num_shards=4, cross_shard=False)
    convert(source.directory, tmp_path / "golden")
    finished, _ = stop_after(source, tmp_path / "out", 2)
    bad = next(name for name in sorted(source.shards, reverse=True) if name not in finished)
    content = (source.directory / bad).read_bytes()
    name = next(name for name in source.shards[bad] if name.endswith("_scale_inv"))
    source.tensor(name).fill_(float("nan"))
    source.write()
    with pytest.raises(SourceError) as caught:
        convert(source.directory, tmp_path / "out", num_jobs=1)
    assert caught.value.tensor == name.removesuffix("_scale_inv")
    assert any("the same command goes on" in note for note in caught.value.__notes__)
    made = {one: (partial(tmp_path) / one).stat().st_mtime_ns for one in finished}
    (source.directory / bad).write_bytes(content)
    convert(source.directory, tmp_path / "out")
    assert directory_bytes(tmp_path / "out") == directory_bytes(tmp_path / "golden")
    assert {one: (tmp_path / "out" / one).stat().st_mtime_ns for one in finished} == made


def test_a_repaired_source_that_lends_scales_to_finished_shards_is_gone_on_from(tiny_checkpoint, tmp_path):
    """What was made with a scale out of the bad shard is made again, and nothing is thrown away by hand."""
    source = tiny_checkpoint(num_shards=4)
    convert(source.directory, tmp_path / "golden")
    bad = sorted(source.shards)[2]
    name = next(name for name, tensor in source.shards[bad].items() if tensor.dtype == torch.float8_e4m3fn)
    good = source.tensor(name).clone()
    source.tensor(name).view(torch.uint8)[0, 0] = 0x7F
    source.write()
    finished, _ = stop_after(source, tmp_path / "out", 2)
    lent = {one.removesuffix("_scale_inv") for one in source.shards[bad] if one.endswith("_scale_inv")}
    assert bad not in finished
    assert any(lent & source.shards[one].keys() for one in finished)
    with pytest.raises(SourceError) as caught:
        convert(source.directory, tmp_path / "out", num_jobs=1)
    assert caught.value.tensor == name
    source.tensor(name).copy_(good)
    source.write()
    convert(source.directory, tmp_path / "out")
    assert directory_bytes(tmp_path / "out") == directory_bytes(tmp_path / "golden")


@pytest.mark.parametrize("damage", ["half", "flipped", "gone", "a link"])
def test_a_finished_shard_that_is_not_what_it_was_is_made_again(damage, source, golden, tmp_path):
    finished, _ = stop_after(source, tmp_path / "out", 2)
    path = partial(tmp_path) / finished[0]
    content = path.read_bytes()
    path.unlink()
    if damage == "half":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "a link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    convert(source.directory, tmp_path / "out")
    assert directory_bytes(tmp_path / "out") == golden
    assert not (tmp_path / "out" / finished[0]).is_symlink()


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_torn_journal_is_believed_up_to_the_tear(cut, source, golden, tmp_path):
    stop_after(source, tmp_path / "out", 3)
    path = partial(tmp_path) / WORK_NAME / "journal-0.jsonl"
    os.truncate(path, path.stat().st_size - cut)
    convert(source.directory, tmp_path / "out")
    assert directory_bytes(tmp_path / "out") == golden


def test_a_flipped_bit_in_the_journal_is_not_believed(source, golden, tmp_path):
    stop_after(source, tmp_path / "out", 3)
    path = partial(tmp_path) / WORK_NAME / "journal-0.jsonl"
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    convert(source.directory, tmp_path / "out")
    assert directory_bytes(tmp_path / "out") == golden


def test_what_lies_in_the_partial_directory_and_is_not_finished_is_removed(source, golden, tmp_path):
    stop_after(source, tmp_path / "out", 1)
    (partial(tmp_path) / "stray.safetensors").write_bytes(b"x")
    (partial(tmp_path) / "folder").mkdir()
    (partial(tmp_path) / "folder" / "file").write_text("x")
    convert(source.directory, tmp_path / "out")
    assert directory_bytes(tmp_path / "out") == golden


def test_nothing_finished_is_nothing_kept(source, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(local, "run_task", fail)
    with pytest.raises(KeyboardInterrupt) as caught:
        convert(source.directory, tmp_path / "out")
    assert not hasattr(caught.value, "__notes__")
    assert not partial(tmp_path).exists()


def test_work_that_verification_finds_wrong_is_not_kept(source, tmp_path, monkeypatch):
    from quantkit.errors import VerificationError

    def refuse(findings):
        raise VerificationError("is wrong", remedy="report it")

    monkeypatch.setattr(convert_module, "_refuse_bad", refuse)
    with pytest.raises(VerificationError):
        convert(source.directory, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_starting_over_throws_the_work_away(source, golden, tmp_path):
    stop_after(source, tmp_path / "out", 2)
    with pytest.raises(UsageError):
        convert(source.directory, tmp_path / "out", group_size=64)
    command = [sys.executable, "-c", "from quantkit.cli.app import main; main()", "convert", str(source.directory)]
    command += ["-o", str(tmp_path / "out"), "--group-size", "64", "--no-resume", "-q"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    convert(source.directory, tmp_path / "fresh", group_size=64)
    assert directory_bytes(tmp_path / "out") == directory_bytes(tmp_path / "fresh")


def test_the_journal_of_another_rank_or_format_is_no_ordinary_run(source, tmp_path):
    stop_after(source, tmp_path / "out", 1)
    path = partial(tmp_path) / WORK_NAME / "run.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "world_size": 4}))
    with pytest.raises(UsageError, match="world_size was 4 and is 1"):
        convert(source.directory, tmp_path / "out")


def touch_back(path, status):
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_source_that_changes_behind_its_back_is_found(source, golden, tmp_path):
    """Length and time of the content are put back; the time of the change cannot be."""
    finished, _ = stop_after(source, tmp_path / "out", 2)
    path = source.directory / finished[0]
    content, status = path.read_bytes(), path.stat()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    touch_back(path, status)
    with pytest.raises(UsageError, match="has changed, or may have, since"):
        convert(source.directory, tmp_path / "out")
    path.write_bytes(content)
    touch_back(path, status)
    convert(source.directory, tmp_path / "out")
    assert directory_bytes(tmp_path / "out") == golden


@pytest.mark.parametrize("which", [0, -1])
def test_a_source_that_changes_during_the_run_is_no_source(which, source, tmp_path, monkeypatch):
    name = sorted(path.name for path in source.directory.glob("*.safetensors"))[which]
    original, changed = journal.Journal.add_output, []

    def add_output(recorder, shard, entry):
        original(recorder, shard, entry)
        if not changed:
            changed.append(shard)
            path = source.directory / name
            content = path.read_bytes()
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    monkeypatch.setattr(journal.Journal, "add_output", add_output)
    with pytest.raises((SourceError, UsageError)) as caught:
        convert(source.directory, tmp_path / "out", num_jobs=1)
        convert(source.directory, tmp_path / "out", num_jobs=1)  # at the latest now
    assert caught.value.file == name
    assert "has changed" in caught.value.message


def test_journals_belong_to_the_run_that_wrote_them(source, golden, tmp_path):
    stop_after(source, tmp_path / "out", 3)
    (partial(tmp_path) / WORK_NAME / "run.json").unlink()
    convert(source.directory, tmp_path / "out", scales="absmax")
    convert(source.directory, tmp_path / "fresh", scales="absmax")
    assert directory_bytes(tmp_path / "out") == directory_bytes(tmp_path / "fresh")
    assert directory_bytes(tmp_path / "out") != golden


def test_a_journal_line_with_a_right_checksum_and_other_content_is_a_tear(source, golden, tmp_path):
    stop_after(source, tmp_path / "out", 1)
    work = partial(tmp_path) / WORK_NAME
    run = journal.run_id(work)
    for text in ("[]", "{}", '{"output": 1}', '{"bytes": 1, "sha256": "x", "output": "a", "inputs": [], "errors": []}'):
        with (work / "journal-0.jsonl").open("a") as stream:
            stream.write(f"{journal._checksum(run, text)} {text}\n")
        assert set(journal.read_journals(work).outputs) <= {path.name for path in partial(tmp_path).iterdir()}
    convert(source.directory, tmp_path / "out")
    assert directory_bytes(tmp_path / "out") == golden


@pytest.mark.parametrize("kind", ["pipe", "link", "second name"])
def test_a_journal_that_is_no_file_of_its_own_is_refused(kind, source, tmp_path):
    stop_after(source, tmp_path / "out", 1)
    path = partial(tmp_path) / WORK_NAME / "journal-0.jsonl"
    (tmp_path / "elsewhere").write_bytes(path.read_bytes())
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.hardlink_to(tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere").read_bytes()
    with pytest.raises((UsageError, ResourceError)):
        convert(source.directory, tmp_path / "out")
    assert (tmp_path / "elsewhere").read_bytes() == before


def test_a_kill_while_a_failed_run_is_removed_is_no_obstacle(small_source, tmp_path, monkeypatch):
    """At every call of the removal; what is left is ours, and the next run removes it."""
    source, golden = small_source
    from quantkit.errors import VerificationError

    def refuse(findings):
        raise VerificationError("is wrong", remedy="report it")

    def fail(root):
        with monkeypatch.context() as patch, suppress(VerificationError):
            patch.setattr(convert_module, "_refuse_bad", refuse)
            convert(source.directory, root / "out", num_jobs=1)

    root = tmp_path / "counted"
    root.mkdir()
    faults = Faults(root, removals=True)
    with faults.injected(fail_with(0), NO_FAULT):
        fail(root)
    removals = [at for at, call in enumerate(faults.calls) if call.startswith(("unlink", "rmdir"))]
    removals = [at for at in removals if at > max(n for n, call in enumerate(faults.calls) if "pwrite" in call)]
    assert len(removals) >= 6
    for at in removals:
        root = tmp_path / str(at)
        root.mkdir()

        def run(root=root, at=at):
            with Faults(root, removals=True).injected(die_before, at):
                fail(root)

        assert in_a_child(run) == signal.SIGKILL
        convert(source.directory, root / "out")
        assert directory_bytes(root / "out") == golden
