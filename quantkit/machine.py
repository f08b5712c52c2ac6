"""What this machine, container or cpuset gives to the process."""

import gc
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Cores that this process may use: its affinity, and a container's quota where one is set."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def available_memory_bytes() -> int | None:
    """The smaller of the machine's available memory and what is left of a container's; None where neither is known."""
    found = []
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) << 10)
    limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
    if limit.isdigit():
        found.append(max(0, int(limit) - int(used if used.isdigit() else 0)))
    return min(found) if found else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


@contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's cycle collector, which would walk again and again over millions of objects that all stay."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()  # nor is it worth a walk from now on
            gc.enable()


def speed_text(num_bytes: int, earlier_bytes: int, seconds: float) -> str:
    """How fast this run was; what an earlier one has made is no part of it."""
    rate = (num_bytes - earlier_bytes) / max(seconds, 1e-9) / 1e6
    earlier = f", {bytes_text(earlier_bytes)} of it before this run" if earlier_bytes else ""
    return f"{rate:.0f} MB/s{earlier}"


def bytes_text(num_bytes: int) -> str:
    """Bytes in the largest unit (powers of 2) that does not read 0."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size or (unit == "GiB" and num_bytes >= size // 10):
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes} B"
