"""What a conversion may use: memory, cores, file handles, and places on the disk."""

import errno
import os
import resource
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quantkit import machine
from quantkit.checkpoint.disk import named_errors
from quantkit.errors import ResourceError
from quantkit.plan import resources
from quantkit.plan.resources import BASE_BYTES, WORKER_BYTES, choose_jobs, memory_bytes
from tests.convert.helpers import PROGRAM, convert, directory_bytes, load_output, same


def command(source, target, *options):
    return [sys.executable, "-c", PROGRAM, "convert", str(source), "-o", str(target), "-q", *options]


@pytest.mark.parametrize(
    ("jobs", "limit", "expected"),
    [(None, None, 4), (None, BASE_BYTES + 2 * WORKER_BYTES, 2), (3, BASE_BYTES + 3 * WORKER_BYTES, 3), (9, None, 9)],
)
def test_workers_fit_into_the_memory_that_is_allowed(jobs, limit, expected, monkeypatch):
    monkeypatch.setattr(resources, "available_cores", lambda: 4)
    monkeypatch.setattr(resources, "available_memory_bytes", lambda: 1 << 40)
    assert choose_jobs(jobs, limit) == expected


@pytest.mark.parametrize(("jobs", "limit"), [(2, BASE_BYTES + WORKER_BYTES), (None, BASE_BYTES), (None, 0)])
def test_what_does_not_fit_is_said_with_both_figures(jobs, limit):
    with pytest.raises(ResourceError, match=r"workers need .* of memory and .* are allowed"):
        choose_jobs(jobs, limit)


def test_the_limit_of_a_container_is_the_default(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text(f"{BASE_BYTES + 3 * WORKER_BYTES + 1000}\n")
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert machine.available_cores() == 3
    assert choose_jobs(None, None) == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2)))
    assert choose_jobs(None, None) == 2


def test_peak_memory_stays_below_what_was_allowed(tiny_checkpoint, tmp_path):
    """A tensor of 400 MB and one worker: memory is a few row blocks, and the interpreter."""
    source = tiny_checkpoint(write=False)
    source.put("model.ballast", torch.zeros(100_000, 1000))
    source.write()
    allowed = memory_bytes(1)
    options = ("--max-memory", f"{allowed / 2**30:.3f}")
    program = "import sys\nfrom quantkit.cli.app import main\ntry:\n    main()\nfinally:\n"
    program += "    sys.stderr.write(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    line = [sys.executable, "-c", program, *command(source.directory, tmp_path / "out", *options)[3:]]
    ran = subprocess.run(line, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stderr.split()[-1]) << 10 < allowed


def test_file_handles_are_bounded_with_a_thousand_shards(tiny_checkpoint, tmp_path):
    """As many shards as no published model has, and 64 handles."""
    source = tiny_checkpoint(num_shards=4, write=False)
    one = tiny_checkpoint("one", num_shards=4)
    names = [name for tensors in source.shards.values() for name in tensors]
    tensors = {name: source.tensor(name) for name in names}
    source.shards.clear()
    for number in range(1000):
        source.shards[f"model-{number + 1:05d}-of-01000.safetensors"] = {
            f"extra.{number}.bias": torch.zeros(1, dtype=torch.bfloat16)
        }
    for number, (name, tensor) in enumerate(tensors.items()):
        source.shards[f"model-{number % 1000 + 1:05d}-of-01000.safetensors"][name] = tensor
    source.write()

    def few_handles():
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    ran = subprocess.run(
        command(source.directory, tmp_path / "out"),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=few_handles,
    )
    assert ran.returncode == 0, ran.stderr
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1000
    convert(one.directory, tmp_path / "golden")
    made, expected = load_output(tmp_path / "out"), load_output(tmp_path / "golden")
    assert {name for name in made if not name.startswith("extra.")} == set(expected)
    assert all(same(made[name], tensor) for name, tensor in expected.items())


def test_a_source_of_links_is_read(tiny_checkpoint, tmp_path):
    """As the hub client's cache is made: a snapshot of links into blobs."""
    source = tiny_checkpoint()
    snapshot, blobs = tmp_path / "repo" / "snapshots" / "abc", tmp_path / "repo" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in source.directory.iterdir():
        shutil.copy(path, blobs / path.name.replace("model", "x"))
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name.replace("model", "x"))
    convert(source.directory, tmp_path / "golden")
    convert(snapshot, tmp_path / "out")
    assert directory_bytes(tmp_path / "out") == directory_bytes(tmp_path / "golden")


def test_a_source_is_only_read_and_nothing_else_is_written(tiny_checkpoint, tmp_path):
    """Neither content nor times of the source change, and no other place is touched."""
    source = tiny_checkpoint().directory
    for path in source.iterdir():
        path.chmod(stat.S_IRUSR)
    source.chmod(stat.S_IRUSR | stat.S_IXUSR)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ctime_ns) for path in (source, *source.iterdir())}
    home = tmp_path / "home"
    home.mkdir()
    env = {**os.environ, "HOME": str(home), "TMPDIR": str(home), "HF_HOME": str(home / "hf")}
    (tmp_path / "work").mkdir()
    ran = subprocess.run(
        command(source, tmp_path / "work" / "out"), capture_output=True, text=True, check=False, env=env, cwd=home
    )
    assert ran.returncode == 0, ran.stderr
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ctime_ns) for path in before} == before
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["out"]
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EMFILE, "raise the limit of open files (`ulimit -n`) or give fewer --jobs"),
        (errno.ENOSPC, "free space or choose another disk"),
    ],
)
def test_the_remedy_is_that_of_what_ran_out(number, words, tmp_path):
    with pytest.raises(ResourceError) as caught, named_errors(tmp_path / "model.safetensors"):
        raise OSError(number, os.strerror(number))
    assert words in str(caught.value)
