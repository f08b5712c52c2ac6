#!/usr/bin/env python
"""How much of a hub's speed a streamed conversion keeps, and how it scales with workers. Prints ratios from one run.

A server on loopback sends shards at ``--megabytes`` a second in all (0: as fast as it can). Measured: the hub client
alone downloading the same shards, the conversion that streams them, and the conversion of the same source on the disk
with one worker and with all.

    scripts/benchmark_hub.py [--experts 66] [--shards 64] [--megabytes 100]
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from tests.checkpoint import hub_server

ROOT = Path(__file__).parent.parent

CONVERT = "from quantkit.cli.app import main; main()"
DOWNLOAD = """
import sys
from huggingface_hub import hf_hub_download
from concurrent.futures import ThreadPoolExecutor
repository, commit, directory, *names = sys.argv[1:]
with ThreadPoolExecutor(4) as pool:
    list(pool.map(lambda name: hf_hub_download(repository, name, revision=commit, local_dir=directory), names))
"""


class Throttle:
    """Lets so many bytes pass a second, whoever sends them."""

    def __init__(self, bytes_per_second: float) -> None:
        self.rate, self._lock, self._free = bytes_per_second, threading.Lock(), 0.0
        self.sent: list[tuple[float, int]] = []  # when, and how many bytes

    def wait(self, num_bytes: int) -> None:
        self.sent.append((time.monotonic(), num_bytes))
        if not self.rate:
            return
        with self._lock:
            self._free = max(self._free, time.monotonic()) + num_bytes / self.rate
            pause = self._free - time.monotonic()
        if pause > 0:
            time.sleep(pause)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=66)
    parser.add_argument("--shards", type=int, default=64, help="real checkpoints of this kind have 61 to 141")
    parser.add_argument("--megabytes", type=float, default=100, help="a second, of the server; 0: no limit")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make = [str(ROOT / "scripts/make_checkpoint.py"), str(work / "source"), "--real", "--layers", "1"]
        # a small vocabulary: embedding and head, which are never cut, would be half of so few layers
        make += [
            "--vocab",
            "4096",
            "--dense-layers",
            "0",
            "--experts",
            str(options.experts),
            "--shards",
            str(options.shards),
        ]
        subprocess.run([sys.executable, *make], check=True, stdout=subprocess.DEVNULL)
        measure(work, options.megabytes * 1e6)


def measure(work: Path, bytes_per_second: float) -> None:
    """Run and print."""
    source = work / "source"
    names = sorted(path.name for path in source.glob("*.safetensors"))
    num_bytes = sum((source / name).stat().st_size for name in names)
    throttle = Throttle(bytes_per_second)

    def send(hub: hub_server.Hub, path: Path) -> None:
        """As the server does, in turns with the others."""
        write = hub.wfile.write

        def slowly(chunk: bytes) -> int:
            throttle.wait(len(chunk))
            return write(chunk)

        hub.wfile.write = slowly  # type: ignore[method-assign, assignment]
        hub.troubles, kept = iter(()), hub.troubles
        hub.answer_file(path)
        hub.troubles = kept

    with hub_server.serve(source) as (handler, endpoint):
        handler.lists_hashes = True
        handler.troubles = iter(lambda: send, None)
        env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        env["HF_HOME"] = str(work / "home")
        download = [DOWNLOAD, hub_server.REPOSITORY, hub_server.COMMIT, str(work / "raw"), *names]
        raw = timed(download, env)
        # room for a few shards, not for all
        spool = ["--spool-gib", f"{3.5 * max((source / name).stat().st_size for name in names) / 2**30:.3f}"]
        throttle.sent.clear()
        began = time.monotonic()
        streamed = timed([CONVERT, "convert", hub_server.REPOSITORY, "-o", str(work / "streamed"), "-q", *spool], env)
        filling, draining = ends_of(throttle.sent, began, began + streamed)
    jobs = len(os.sched_getaffinity(0))
    local = timed(
        [CONVERT, "convert", str(source), "-o", str(work / "local"), "-q", "--jobs", str(jobs)], dict(os.environ)
    )
    single = timed([CONVERT, "convert", str(source), "-o", str(work / "single"), "-q", "--jobs", "1"], dict(os.environ))
    for name, seconds in (
        ("hub client alone", raw),
        ("streamed conversion", streamed),
        (f"from the disk, {jobs} workers", local),
        ("from the disk, 1 worker", single),
    ):
        print(f"{name}: {seconds:.1f} s, {num_bytes / seconds / 1e6:.0f} MB/s of {num_bytes / 1e9:.2f} GB")
    print(f"streamed over the hub client alone: {raw / streamed:.2f}")
    print(
        f"of the streamed conversion {filling:.1f} s before the first shard came, {draining:.1f} s behind the last byte"
    )
    print(f"streamed over the slower of hub and disk: {max(raw, local) / streamed:.2f}")
    print(f"{jobs} workers over one: {single / local:.2f}")


def ends_of(sent: list[tuple[float, int]], began: float, ended: float) -> tuple[float, float]:
    """Seconds until a hundredth of the bytes was sent (headers are less), and from the last byte to the end."""
    total, so_far = sum(num_bytes for _, num_bytes in sent), 0
    for when, num_bytes in sent:
        so_far += num_bytes
        if so_far > total / 100:
            return when - began, ended - sent[-1][0]
    raise AssertionError("nothing was sent")


def timed(arguments: list[str], env: dict[str, str]) -> float:
    """Seconds that a Python program takes."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", *arguments], check=True, env=env, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


if __name__ == "__main__":
    main()
