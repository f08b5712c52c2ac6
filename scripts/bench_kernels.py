#!/usr/bin/env python
"""Times the kernels on a GPU: microseconds, bytes, share of the measured copy bandwidth, ratios to other ways.

Every figure is the median of five replays of a CUDA graph of twenty calls. Products and decode go over weights or rows
of at least 300 MB in turns, with fresh random routing for each call, so that nothing is read from the cache that a
server would not find there; what is stored or requantized is the same in each call, and page tags, of other requests in
each, stay in the cache. Shapes are those of GLM-5.2 and Kimi-K2 on eight GPUs. ``--once`` runs every case of small
shapes once and times nothing.

    scripts/bench_kernels.py [--only dense,moe,store,mla,tags,requantize] [--tokens 1,2,4] [--once]
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))  # so that it runs from anywhere
sys.path.insert(0, str(Path(__file__).parent))
from bench_cases import Case, Sizes, cases_of

from quantkit_kernels.launch import IS_INTERPRETED

CALLS, REPLAYS = 20, 5
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 4096)
KINDS = ("dense", "moe", "store", "mla", "tags", "requantize")


@dataclass(frozen=True)
class Timed:
    """``microseconds`` a call, of the kernel and of the other ways."""

    case: Case
    microseconds: float
    others: dict[str, float]


def graph_microseconds(call: Callable[[int], object]) -> float:
    """Median time of one call, in a graph of twenty; each is told its number."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(CALLS):
            call(number)
    times: list[float] = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of copies of half a gigabyte."""
    buffers = [torch.empty(1 << 29, dtype=torch.uint8, device="cuda") for _ in range(4)]
    microseconds = graph_microseconds(lambda i: buffers[i % 4].copy_(buffers[(i + 1) % 4]))
    return 2 * (1 << 29) / microseconds * 1e6


def clock_text() -> str:
    """The clock of the SMs, as nvidia-smi sees it while a copy runs."""
    busy = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    for _ in range(200):
        busy.copy_(busy.flip(0))
    asked = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader", "-i", str(torch.cuda.current_device())]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        told = "clock unknown"
    torch.cuda.synchronize()
    return told


def time_case(case: Case) -> Timed:
    """The kernel, and the other ways of doing the same; one that fails here is named, and has no time."""
    others: dict[str, float] = {}
    for name, call in case.others.items():
        try:
            others[name] = graph_microseconds(call)
        except RuntimeError as error:
            print(f"{case.name}: {name} failed: {error}", file=sys.stderr)
    return Timed(case, graph_microseconds(case.call), others)


def line_of(timed: Timed, bandwidth: float) -> str:
    """A row of the table."""
    case, microseconds = timed.case, timed.microseconds
    speed = case.num_bytes / microseconds * 1e6
    ratios = {name: others / microseconds for name, others in timed.others.items()}
    measured = {"us": microseconds, "TB/s": speed / 1e12, "% of copies": 100 * speed / bandwidth}
    measured |= {f"x {name}": ratio for name, ratio in ratios.items()}
    return (
        f"| {case.name} | {microseconds:.1f} | {case.num_bytes / 1e6:.1f} | {measured['TB/s']:.2f} | "
        f"{measured['% of copies']:.0f} % | {', '.join(f'{name} {ratio:.2f}x' for name, ratio in ratios.items())} | "
        f"{'; '.join(goal.text(measured) for goal in case.goals)} |"
    )


def numbers(text: str) -> list[int]:
    """For argparse: numbers of tokens, with commas."""
    found = [int(one) for one in text.split(",")]
    if min(found) < 1:
        raise ValueError
    return found


def kinds(text: str) -> list[str]:
    """For argparse: kinds, with commas."""
    found = text.split(",")
    unknown = sorted(set(found) - set(KINDS))
    if unknown:
        raise argparse.ArgumentTypeError(f"takes of {', '.join(KINDS)}, not {', '.join(map(repr, unknown))}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=kinds, default=list(KINDS), help="kinds, with commas")
    parser.add_argument("--tokens", type=numbers, default=list(TOKENS), help="numbers, with commas")
    parser.add_argument("--once", action="store_true", help="run small shapes once, time nothing")
    options = parser.parse_args()
    if options.once:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu" and not IS_INTERPRETED:
            sys.exit("torch sees no GPU: set TRITON_INTERPRET=1, and --once runs every case in Triton's interpreter")
        for case in cases_of(options.only, [1, 5], Sizes.small(), device):
            for call in (case.call, *case.others.values()):
                call(0)
            print(f"{case.name}: ran, {case.num_bytes:,} bytes")
        return
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU; --once runs every case in Triton's interpreter (TRITON_INTERPRET=1)")
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, ", end="")
    print(f"{clock_text()}, copies at {bandwidth / 1e12:.2f} TB/s\n")
    print("| case | us | MB | TB/s | of the copies | others take | goals |\n|---|---:|---:|---:|---:|---|---|")
    for case in cases_of(options.only, options.tokens, Sizes(), "cuda"):
        print(line_of(time_case(case), bandwidth), flush=True)


if __name__ == "__main__":
    main()
