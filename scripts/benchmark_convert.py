#!/usr/bin/env python
"""Time `quantkit convert` against llm-compressor and against a plain copy, in one run on one machine.

Every step is a whole process, start-up included. Wall time is until it exits, CPU time is user plus system. Peak
memory is the RSS of the process tree, summed from /proc every 50 ms, or one process's own high-water mark where that
is more; pages of mapped files count, and a page that processes share counts once for each (RSS, not PSS).

Sources are made just before use, so they lie in the page cache. The disk is synced before each step, and 'flush' is
how long it takes afterwards to write what a step has left in memory: quantkit and the copy fsync, llm-compressor does
not. 'others' is the CPU time that the rest of the machine took meanwhile: a row where it is much is worth nothing.
A small conversion of each kind comes first, uncounted: it leaves numba's compiled kernels in their cache.
Errors are those of a few expert weights against the FP8 source, decoded by compressed-tensors and torch alone.

Needs Linux, the `dev` extra and 6 GB of disk; takes some minutes. A step that fails is named, and the exit code is 1.

    scripts/benchmark_convert.py --json figures.json
"""

import argparse
import json
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

TASKS = [sys.executable, Path(__file__).with_name("benchmark_tasks.py")]
MAKE = [sys.executable, Path(__file__).with_name("make_checkpoint.py")]
REAL = ["--real", "--layers", 1, "--dense-layers", 0, "--no-mtp", "--vocab", 1024]
QUANTKIT = Path(sys.executable).with_name("quantkit")
NUM_JOBS = len(os.sched_getaffinity(0))
GROUP_SIZE = 32
NUM_MSE_EXPERTS = 16
POLL_SECONDS = 0.05
COLUMNS = (  # heading, key, unit, decimals; MB/CPU s: FP8 encoded, the encoders' own CPU time
    ("wall s", "wall_seconds", 1, 2),
    ("CPU s", "cpu_seconds", 1, 2),
    ("others s", "other_cpu_seconds", 1, 2),
    ("flush s", "flush_seconds", 1, 2),
    ("peak MB", "peak_bytes", 1e6, 0),
    ("in MB", "source_bytes", 1e6, 0),
    ("out MB", "output_bytes", 1e6, 0),
    ("error", "relative_error", 1, 5),
    ("MB/CPU s", "encoded_bytes_per_cpu_second", 1e6, 0),
)
RATIOS = (  # key, of, over, what it says
    ("wall_seconds", "llm-compressor minmax", "search", "search: times as fast as llm-compressor minmax"),
    ("wall_seconds", "llm-compressor minmax", "absmax", "absmax: times as fast as llm-compressor minmax"),
    ("wall_seconds", "llm-compressor mse", "search, few experts", "search: times as fast as llm-compressor mse"),
    ("relative_error", "search, few experts", "llm-compressor mse", "search: error over that of llm-compressor mse"),
    ("wall_seconds", "search", "copy", "search: wall time over that of the copy"),
    ("wall_seconds", "absmax", "copy", "absmax: wall time over that of the copy"),
    ("peak_bytes", "search, one shard", "search", "search: peak memory, one shard over eight"),
    ("peak_bytes", "llm-compressor minmax", "search", "peak memory, llm-compressor minmax over search"),
)
Row = dict[str, float]
Command = list[Any]


class StepError(Exception):
    """A step that did not do its work, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One row to measure. ``command`` is of a source and of the directory to make."""

    name: str
    experts: int
    shards: int
    command: Callable[[Path, Path], Command]
    is_conversion: bool = True


def steps(options: argparse.Namespace) -> Iterator[Step]:
    """All rows, in the order in which they are measured."""
    many, few = options.experts, min(NUM_MSE_EXPERTS, options.experts)
    yield Step(name="copy", experts=many, shards=8, command=copy, is_conversion=False)
    yield Step(name="search", experts=many, shards=8, command=quantkit("search"))
    yield Step(name="absmax", experts=many, shards=8, command=quantkit("absmax"))
    yield Step(name="search, one shard", experts=many, shards=1, command=quantkit("search"))
    if not options.skip_llmcompressor:
        yield Step(name="llm-compressor minmax", experts=many, shards=8, command=llmcompressor("minmax"))
    if not (options.skip_llmcompressor or options.skip_mse):
        yield Step(name="search, few experts", experts=few, shards=1, command=quantkit("search"))
        yield Step(name="llm-compressor mse", experts=few, shards=1, command=llmcompressor("memoryless_mse"))


def quantkit(scales: str) -> Callable[[Path, Path], Command]:
    """A conversion by quantkit."""
    chosen = ["--to", "int4", "--scales", scales, "--group-size", GROUP_SIZE, "--jobs", NUM_JOBS, "--json", "--quiet"]
    return lambda source, output: [QUANTKIT, "convert", source, "--output", output, *chosen]


def llmcompressor(observer: str) -> Callable[[Path, Path], Command]:
    """A conversion by llm-compressor."""
    return lambda source, output: [*TASKS, "llmcompressor", observer, source, output]


def copy(source: Path, output: Path) -> Command:
    """A copy that writes as many bytes as a conversion does."""
    _, plan = run([QUANTKIT, "plan", source, "--json"])
    return [*TASKS, "copy", json.loads(plan)["output"]["shard_bytes"], source, output]


def warm_up(work: Path) -> Row:
    """Have numba compile what it has not yet compiled on this machine; nothing is measured."""
    source, output = work / "warm-up", work / "warm-up-int4"
    run([*MAKE, source])
    for scales in ("search", "absmax"):
        run(quantkit(scales)(source, output))
        shutil.rmtree(output)
    return {}


def make_source(step: Step, work: Path) -> Path:
    """The source of a step, made unless an earlier step has made it."""
    source = work / f"{step.experts}-experts-{step.shards}-shards"
    if not source.exists():
        unfinished = source.with_suffix(".unfinished")
        run([*MAKE, unfinished, *REAL, "--experts", step.experts, "--shards", step.shards])
        unfinished.rename(source)
    return source


def measure(step: Step, work: Path) -> Row:
    """Make the source if need be, run, look at the output, remove it."""
    source, output = make_source(step, work), work / "output"
    command = step.command(source, output)
    try:
        os.sync()
        usage, stdout = run(command)
        started = time.perf_counter()
        os.sync()
        row: Row = {**usage, "flush_seconds": time.perf_counter() - started}
        row |= {"source_bytes": shard_bytes(source), "output_bytes": shard_bytes(output)}
        if step.is_conversion:
            row["relative_error"] = float(run([*TASKS, "error", GROUP_SIZE, source, output])[1])
        if command[0] == QUANTKIT:
            told = json.loads(stdout)
            row["encoded_bytes_per_cpu_second"] = told["encoded_bytes"] / told["encode_cpu_seconds"]
        return row
    finally:
        shutil.rmtree(output, ignore_errors=True)


def run(command: Command) -> tuple[Row, str]:
    """Run to the end, in a session of its own; usage and stdout. StepError with stderr's last line on failure."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        started, busy_before, peak_bytes = time.perf_counter(), busy_seconds(), 0
        process = subprocess.Popen(list(map(str, command)), stdout=stdout, stderr=stderr, start_new_session=True)
        is_over = os.pidfd_open(process.pid)
        try:
            while not select.select([is_over], [], [], POLL_SECONDS)[0]:
                peak_bytes = max(peak_bytes, resident_bytes(process.pid))
        except KeyboardInterrupt:  # which the terminal sends to this session only
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            os.close(is_over)
            _, status, used = os.wait4(process.pid, 0)
            wall_seconds, busy_during = time.perf_counter() - started, busy_seconds() - busy_before
            process.returncode = os.waitstatus_to_exitcode(status)
        stdout.seek(0)
        stderr.seek(0)
        if process.returncode:
            lines = stderr.read().strip().splitlines() or ["no message"]
            raise StepError(
                f"{' '.join(Path(str(part)).name for part in command[:4])} ended with {process.returncode}: {lines[-1]}"
            )
        cpu_seconds = used.ru_utime + used.ru_stime
        usage: Row = {"wall_seconds": wall_seconds, "cpu_seconds": cpu_seconds, "peak_bytes": peak_bytes}
        return {**usage, "other_cpu_seconds": max(0.0, busy_during - cpu_seconds)}, stdout.read()


def busy_seconds() -> float:
    """CPU time of everything on this machine since it started."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = Path("/proc/stat").read_text().split()[1:9]
    return sum(map(int, (user, nice, system, irq, softirq, steal))) / os.sysconf("SC_CLK_TCK")


def resident_bytes(session: int) -> int:
    """Of all processes of a session now, or of the largest of them at any time if that was more."""
    total_kib = highest_kib = 0
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            # after the name, which is in parentheses and may hold anything: state, parent, group, session
            if int((directory / "stat").read_text().rpartition(")")[2].split()[3]) != session:
                continue
            lines = (line.partition(":") for line in (directory / "status").read_text().splitlines())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        kib = {key: int(value.split()[0]) for key, _, value in lines if key in ("VmRSS", "VmHWM")}
        total_kib += kib.get("VmRSS", 0)
        highest_kib = max(highest_kib, kib.get("VmHWM", 0))
    return max(total_kib, highest_kib) << 10


def shard_bytes(directory: Path) -> int:
    """Bytes of all shards."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def measure_all(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Rows by name, ratios, and what failed; a failure does not stop the others."""
    rows: dict[str, Row] = {}
    failures: list[str] = []
    actions = [
        ("warm-up", partial(warm_up, work)),
        *((one.name, partial(measure, one, work)) for one in steps(options)),
    ]
    for name, action in actions:
        print(f"... {name}", file=sys.stderr, flush=True)
        try:
            rows[name] = action()
        except (StepError, OSError) as error:
            failures.append(f"{name}: {error}")
            print(f"FAILED {failures[-1]}", file=sys.stderr, flush=True)
    rows.pop("warm-up", None)
    ratios = {label: rows[of][key] / rows[over][key] for key, of, over, label in RATIOS if {of, over} <= rows.keys()}
    machine = {"processor": processor(), "cores": NUM_JOBS, "python": platform.python_version()}
    return {"machine": machine, "steps": rows, "ratios": ratios, "failures": failures}


def processor() -> str:
    """Its name, as the kernel gives it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def print_table(figures: dict[str, Any]) -> None:
    """The figures for people; MB are 10^6 bytes."""
    machine = figures["machine"]
    print(f"{machine['processor']}, {machine['cores']} cores, Python {machine['python']}; sources in the page cache")
    print(" " * 22 + "".join(f"{heading:>10}" for heading, *_ in COLUMNS))
    for name, row in figures["steps"].items():
        cells = (f"{row[key] / unit:.{decimals}f}" if key in row else "-" for _, key, unit, decimals in COLUMNS)
        print(f"{name:22}" + "".join(f"{cell:>10}" for cell in cells))
    for label, ratio in figures["ratios"].items():
        print(f"{ratio:8.2f}  {label}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=44, help="of the large sources, 38 MB each")
    parser.add_argument("--skip-llmcompressor", action="store_true", help="measure quantkit and the copy only")
    parser.add_argument("--skip-mse", action="store_true", help="leave out llm-compressor's slow observer")
    parser.add_argument("--work-dir", type=Path, help="existing directory on the disk to use [default: the system's]")
    parser.add_argument("--keep", action="store_true", help="leave the sources there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file too")
    benchmark(parser.parse_args())


def benchmark(options: argparse.Namespace) -> None:
    """Measure, print, clean up; exit code 1 when a step failed."""
    work = Path(tempfile.mkdtemp(prefix="quantkit-benchmark-", dir=options.work_dir))
    try:
        figures = measure_all(options, work)
    finally:
        if not options.keep:
            shutil.rmtree(work)
    print_table(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if options.keep:
        print(f"kept: {work}")
    sys.exit(1 if figures["failures"] else 0)


if __name__ == "__main__":
    main()
