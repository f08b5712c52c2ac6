#!/usr/bin/env python
"""Time `quantkit convert` against llm-compressor and against a plain copy, in one run on one machine.

Every step is a whole process, start-up included. Wall time is until it exits, CPU time is user plus system. Peak
memory is the RSS of the process tree, summed from /proc every 50 ms, or one process's own high-water mark where that
is more; a page that processes share counts once for each (RSS, not PSS).

Sources are made just before use, so they lie in the page cache. The disk is synced before each step, and 'flush' is
how long it takes afterwards to write what a step has left in memory: quantkit and the copy fsync, llm-compressor does
not. A small conversion of each kind comes first, uncounted: it leaves numba's compiled kernels in their cache.
Errors are those of a few expert weights against the FP8 source, decoded by compressed-tensors and torch alone.

Needs Linux, the `dev` extra and 6 GB of disk; takes some minutes. A step that fails is named, and the exit code is 1.

    scripts/benchmark_convert.py --json figures.json
"""

import argparse
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent
OWN = [sys.executable, __file__]
QUANTKIT = Path(sys.executable).with_name("quantkit")
NUM_JOBS = len(os.sched_getaffinity(0))
POLL_SECONDS = 0.05
CHUNK_BYTES = 8 << 20
GROUP_SIZE = 32
BLOCK = 128
NUM_ERROR_WEIGHTS = 6
NUM_MSE_EXPERTS = 5
REAL = ["--real", "--layers", "1", "--dense-layers", "0", "--no-mtp", "--vocab", "1024"]
# llm-compressor dequantizes what it is told to by name
FP8_MODULES = (r"re:.*\.mlp\..*_proj$", r"re:.*\.self_attn\.\w+_(proj|mqa|b)$", r"re:.*\.indexer\.w(k|q_b)$")
EXPERTS = r"re:.*\.mlp\.experts\.\d+\.\w+_proj$"
# what, wall time of, over wall time of
SPEED_RATIOS = (
    ("search, times as fast as llm-compressor minmax", "llm-compressor minmax", "search"),
    ("absmax, times as fast as llm-compressor minmax", "llm-compressor minmax", "absmax"),
    ("search, times as fast as llm-compressor memoryless_mse", "llm-compressor mse", "search, few experts"),
    ("search, times the copy's time", "search", "copy"),
    ("absmax, times the copy's time", "absmax", "copy"),
)


class StepError(Exception):
    """A step that did not do its work, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One row to measure; ``command`` gets the source and the directory to make appended."""

    name: str
    experts: int
    shards: int
    command: list[Any]
    has_error: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one process tree took."""

    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """A measured row."""

    usage: Usage
    flush_seconds: float
    source_bytes: int
    output_bytes: int
    relative_error: float | None
    encoded_mb_per_cpu_second: float | None


def steps(options: argparse.Namespace) -> Iterator[Step]:
    """All rows; large sources first."""
    large: dict[str, Any] = {"experts": options.experts, "shards": 8}
    yield Step(name="copy", **large, command=[*OWN, "--run-copy"], has_error=False)
    yield Step(name="search", **large, command=quantkit("search"))
    yield Step(name="absmax", **large, command=quantkit("absmax"))
    yield Step(name="search, one shard", experts=options.experts, shards=1, command=quantkit("search"))
    if not options.skip_llmcompressor:
        yield Step(name="llm-compressor minmax", **large, command=llmcompressor("minmax"))
    if not (options.skip_mse or options.skip_llmcompressor):
        small: dict[str, Any] = {"experts": min(NUM_MSE_EXPERTS, options.experts), "shards": 1}
        yield Step(name="search, few experts", **small, command=quantkit("search"))
        yield Step(name="llm-compressor mse", **small, command=llmcompressor("memoryless_mse"))


def quantkit(scales: str) -> list[Any]:
    """Command of a conversion by quantkit, short of source and output."""
    chosen = ["--scales", scales, "--group-size", GROUP_SIZE, "--jobs", NUM_JOBS]
    return [QUANTKIT, "convert", "--to", "int4", *chosen, "--json", "--quiet"]


def llmcompressor(observer: str) -> list[Any]:
    """Command of a conversion by llm-compressor."""
    return [*OWN, "--run-llmcompressor", observer]


def measure_step(step: Step, work: Path) -> StepReport:
    """Make the source if need be, run, look at the output, remove it."""
    source = work / f"{step.experts}-experts-{step.shards}-shards"
    output = work / "output"
    if not source.exists():
        make = [sys.executable, SCRIPTS / "make_checkpoint.py", source, *REAL]
        run([*make, "--experts", step.experts, "--shards", step.shards])
    place: list[Any] = [source, "--output", output] if step.command[0] == QUANTKIT else [source, output]
    try:
        os.sync()
        usage, stdout = run([*step.command, *place])
        started = time.perf_counter()
        os.sync()
        flush_seconds = time.perf_counter() - started
        error = run([*OWN, "--run-errors", source, output])[1] if step.has_error else None
        return StepReport(
            usage=usage,
            flush_seconds=flush_seconds,
            source_bytes=shard_bytes(source),
            output_bytes=shard_bytes(output),
            relative_error=None if error is None else float(error),
            encoded_mb_per_cpu_second=encoding_rate(stdout),
        )
    finally:
        shutil.rmtree(output, ignore_errors=True)


def warm_up(work: Path) -> None:
    """Have numba compile what it has not yet compiled on this machine."""
    source, output = work / "warm-up", work / "warm-up-int4"
    run([sys.executable, SCRIPTS / "make_checkpoint.py", source])
    for scales in ("search", "absmax"):
        run([*quantkit(scales), source, "--output", output])
        shutil.rmtree(output)


def run(command: list[Any]) -> tuple[Usage, str]:
    """Run to the end, in a session of its own; usage and stdout. StepError with stderr's last line on failure."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        started = time.perf_counter()
        process = subprocess.Popen(list(map(str, command)), stdout=stdout, stderr=stderr, start_new_session=True)
        watch = MemoryWatch(process.pid)
        try:
            _, status, used = os.wait4(process.pid, 0)
        except BaseException:  # an interrupt from the terminal reaches only this process
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            peak_bytes = watch.stop()
        wall_seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        stdout.seek(0)
        stderr.seek(0)
        if process.returncode:
            lines = stderr.read().strip().splitlines() or ["no message"]
            raise StepError(f"{Path(command[0]).name} ended with {process.returncode}: {lines[-1]}")
        cpu_seconds = used.ru_utime + used.ru_stime
        return Usage(wall_seconds=wall_seconds, cpu_seconds=cpu_seconds, peak_bytes=peak_bytes), stdout.read()


class MemoryWatch:
    """Follows the memory of a session's processes, from a thread of this one."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._peak_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """The peak, in bytes."""
        self._is_over.set()
        self._thread.join()
        return self._peak_bytes

    def _follow(self) -> None:
        while not self._is_over.wait(POLL_SECONDS):
            sizes = list(resident_bytes(self._session))
            tree_bytes = sum(resident for resident, _ in sizes)
            self._peak_bytes = max(self._peak_bytes, tree_bytes, *(high_water for _, high_water in sizes))


def resident_bytes(session: int) -> Iterator[tuple[int, int]]:
    """Of every process of a session: resident now, and at most since its program started."""
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            # after the name, which is in parentheses and may hold anything: state, parent, group, session
            if int((directory / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                fields = (line.split() for line in (directory / "status").read_text().splitlines())
                kib = {words[0]: int(words[1]) for words in fields if words[0] in ("VmRSS:", "VmHWM:")}
                yield kib.get("VmRSS:", 0) << 10, kib.get("VmHWM:", 0) << 10
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended


def shard_bytes(directory: Path) -> int:
    """Bytes of all shards."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def encoding_rate(stdout: str) -> float | None:
    """MB of FP8 per CPU second of quantkit's encoders, from its JSON; None for another program."""
    if not stdout.startswith("{"):
        return None
    document = json.loads(stdout)
    return float(document["encoded_bytes"]) / 1e6 / float(document["encode_cpu_seconds"])


def run_copy(source: Path, output: Path) -> None:
    """Read every shard; write as many bytes as a conversion writes, alternately; fsync."""
    plan = subprocess.run([QUANTKIT, "plan", source, "--json"], capture_output=True, check=True)
    output_bytes, source_bytes = json.loads(plan.stdout)["output"]["shard_bytes"], shard_bytes(source)
