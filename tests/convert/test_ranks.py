"""Several processes make one output: the same bytes, whoever dies and comes back."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

import quantkit.cli
from quantkit.checkpoint.output import WORK_NAME, OutputDirectory
from quantkit.convert import journal as journal_module
from quantkit.convert.conversion import Conversion
from quantkit.convert.ranks import convert_share, finalize, shares
from quantkit.errors import UsageError
from quantkit.plan.make import make_plan
from quantkit.sources import resolve_source
from tests.convert.helpers import convert, directory_bytes
from tests.convert.plans import plan_of

SCHEMAS = Path(quantkit.cli.__file__).parent / "schemas"


@pytest.fixture
def source(tiny_checkpoint):
    made = tiny_checkpoint(num_shards=5)
    (made.directory / "chat_template.jinja").write_text("{{ x }}")
    return made.directory


@pytest.fixture
def golden(source, tmp_path):
    convert(source, tmp_path / "golden")
    return directory_bytes(tmp_path / "golden")


def conversion(source, target, rank=None, world_size=1, **changes):
    resolved = resolve_source(str(source))
    plan = make_plan(resolved.recipe, resolved.family, resolved.checkpoint)
    return Conversion(plan=plan, target=target, num_jobs=1, rank=rank, world_size=world_size, **changes)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_any_number_of_ranks_makes_the_same_bytes(world_size, source, golden, tmp_path):
    tensors = 0
    for rank in reversed(range(world_size)):
        report = convert_share(conversion(source, tmp_path / "out", rank, world_size))
        assert (report.rank, report.world_size) == (rank, world_size)
        tensors += report.num_tensors
        assert not (tmp_path / "out").exists()
    assert tensors == plan_of(source).num_tensors
    finalize(conversion(source, tmp_path / "out"))
    assert directory_bytes(tmp_path / "out") == golden
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 61, 64])
def test_shares_are_all_of_it_and_balanced(world_size, source):
    plan = plan_of(source)
    dealt = shares(plan, world_size)
    names = [name for share in dealt for name in share]
    assert sorted(names) == sorted(source.name for source in plan.checkpoint.shards)
    sizes = {source.name: source.file_bytes for source in plan.checkpoint.shards}
    loads = [sum(sizes[name] for name in share) for share in dealt]
    assert max(loads) <= sum(loads) / world_size + max(sizes.values())


def test_a_rank_that_died_goes_on_from_what_it_had(source, golden, tmp_path, monkeypatch):
    original, made = journal_module.Journal.add_output, []

    def add_output(recorder, name, entry):
        original(recorder, name, entry)
        made.append(name)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(journal_module.Journal, "add_output", add_output)
        convert_share(conversion(source, tmp_path / "out", 0, 2))
    convert_share(conversion(source, tmp_path / "out", 1, 2))
    with pytest.raises(UsageError, match=r"work is missing of rank 0 \(model-0000"):
        finalize(conversion(source, tmp_path / "out"))
    kept = (tmp_path / "out.partial" / made[0]).stat().st_mtime_ns
    convert_share(conversion(source, tmp_path / "out", 0, 2))
    assert (tmp_path / "out.partial" / made[0]).stat().st_mtime_ns == kept
    finalize(conversion(source, tmp_path / "out"))
    assert directory_bytes(tmp_path / "out") == golden


def test_lost_ranks_are_named(source, tmp_path):
    convert_share(conversion(source, tmp_path / "out", 2, 4))
    with pytest.raises(UsageError) as caught:
        finalize(conversion(source, tmp_path / "out"))
    assert [f"rank {rank} (" in caught.value.message for rank in range(4)] == [True, True, False, True]
    assert "start these ranks again" in caught.value.remedy
    assert (tmp_path / "out.partial").is_dir()


def test_a_shard_that_is_damaged_before_the_end_is_named_with_its_rank(source, golden, tmp_path):
    for rank in range(2):
        convert_share(conversion(source, tmp_path / "out", rank, 2))
    rank = next(
        rank for rank, names in enumerate(shares(plan_of(source), 2)) if "model-00003-of-00005.safetensors" in names
    )
    path = tmp_path / "out.partial" / "model-00003-of-00005.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UsageError, match=rf"rank {rank} \(model-00003-of-00005.safetensors\)"):
        finalize(conversion(source, tmp_path / "out"))
    convert_share(conversion(source, tmp_path / "out", rank, 2))
    finalize(conversion(source, tmp_path / "out"))
    assert directory_bytes(tmp_path / "out") == golden


def test_what_does_not_go_together(source, tmp_path):
    with pytest.raises(UsageError, match="no rank has begun"):
        finalize(conversion(source, tmp_path / "out"))
    with pytest.raises(UsageError, match="--rank 2 is none of 2"):
        convert_share(conversion(source, tmp_path / "out", 2, 2))
    convert_share(conversion(source, tmp_path / "out", 0, 2))
    with pytest.raises(UsageError, match="world_size was 2 and is 3") as caught:
        convert_share(conversion(source, tmp_path / "out", 0, 3))
    assert caught.value.remedy.endswith("to start over, remove the directory")
    with pytest.raises(UsageError, match="world_size was 2 and is 1"):
        convert(source, tmp_path / "out")
    other = conversion(source, tmp_path / "out", 1, 2)
    with pytest.raises(UsageError, match=r"recipe\.name was"):
        convert_share(
            replace(other, plan=replace(other.plan, recipe=other.plan.recipe.model_copy(update={"name": "x"})))
        )


def test_nobody_takes_over_a_rank_that_is_at_work(source, tmp_path):
    with OutputDirectory(tmp_path / "out", rank=0):
        with pytest.raises(UsageError, match="is being written by another run"):
            convert_share(conversion(source, tmp_path / "out", 0, 2))
        convert_share(conversion(source, tmp_path / "out", 1, 2))
        with pytest.raises(UsageError, match="is being written by another run"):
            finalize(conversion(source, tmp_path / "out"))


def command(source, tmp_path, *options):
    program = "from quantkit.cli.app import main; main()"
    return [sys.executable, "-c", program, "convert", str(source), "-o", str(tmp_path / "out"), "-q", *options]


def test_processes_side_by_side_and_one_of_them_killed(source, golden, tmp_path):
    """As a launcher starts them; the one that was killed is started again."""
    processes = [
        subprocess.Popen(command(source, tmp_path, "--rank", str(rank), "--world-size", "3", "--json"), stdout=-1)
        for rank in range(3)
    ]
    deadline = time.monotonic() + 60
    while not (tmp_path / "out.partial" / WORK_NAME / "journal-1.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    processes[1].send_signal(signal.SIGKILL)
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes][::2] == [0, 0]
    for rank in (0, 2):
        document = json.loads(outputs[rank])
        jsonschema.validate(document, json.loads((SCHEMAS / "convert-rank.json").read_text()))
        assert (document["rank"], document["world_size"]) == (rank, 3)
    again = subprocess.run(
        command(source, tmp_path, "--rank", "1", "--world-size", "3"), capture_output=True, check=False
    )
    assert again.returncode == 0, again.stderr
    assert b"--finalize" in again.stdout
    ended = subprocess.run(command(source, tmp_path, "--finalize"), capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert directory_bytes(tmp_path / "out") == golden


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rank", "0"), "--rank and --world-size go together"),
        (("--world-size", "2"), "--rank and --world-size go together"),
        (("--rank", "0", "--world-size", "0"), "--world-size 0 is no number of ranks"),
        (("--rank", "0", "--world-size", "2", "--finalize"), "--finalize comes after all ranks"),
        (("--rank", "0", "--world-size", "2", "--no-resume"), "would throw away what other ranks have made"),
        (("--finalize",), "no rank has begun"),
        (("--max-memory", "0"), "--max-memory 0 is no memory"),
        (("--max-memory", "-1"), "--max-memory -1 is no memory"),
    ],
)
def test_options_that_do_not_go_together(options, words, source, tmp_path):
    ran = subprocess.run(
        command(source, tmp_path, *options), capture_output=True, text=True, check=False, env={**os.environ}
    )
    assert ran.returncode == 2
    assert words in ran.stderr
    assert not (tmp_path / "out.partial").exists()


def test_a_source_that_changes_between_two_ranks_is_found(tiny_checkpoint, tmp_path):
    """Scales of the first shard lie in the second, which another rank hashes."""
    source = tiny_checkpoint(num_shards=5).directory
    name = "model-00002-of-00005.safetensors"
    dealt = shares(plan_of(source), 2)
    first = next(rank for rank, names in enumerate(dealt) if name not in names)
    convert_share(conversion(source, tmp_path / "out", first, 2))
    content = bytearray((source / name).read_bytes())
    content[-1] ^= 1
    (source / name).write_bytes(content)
    convert_share(conversion(source, tmp_path / "out", 1 - first, 2))
    with pytest.raises(UsageError, match="has changed, or may have, since") as caught:
        finalize(conversion(source, tmp_path / "out"))
    assert caught.value.file == name


@pytest.mark.parametrize("world_size", [0, -1, 10**13, True, "2", None])
def test_a_number_of_ranks_that_cannot_be_is_said(world_size, source, tmp_path):
    convert_share(conversion(source, tmp_path / "out", 0, 2))
    path = tmp_path / "out.partial" / WORK_NAME / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "world_size": world_size}))
    with pytest.raises(UsageError, match="says world_size"):
        finalize(conversion(source, tmp_path / "out"))
