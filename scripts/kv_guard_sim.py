#!/usr/bin/env python
"""Try to break the KV guard, at length: millions of page checks without a fault, and hundreds of faults.

    scripts/kv_guard_sim.py --checks 10000000 --single 40 --combined 40

`quantkit kv-guard selftest` does the same in less than a minute. One seed gives one result, but for the times.
"""

import argparse
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

from quantkit.cli.show_kv_guard import show_selftest
from quantkit.kv_guard.simulation.run import SelfTestPlan, self_test


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", type=int, default=10_000_000, help="of pages, without faults")
    parser.add_argument("--single", type=int, default=40, help="injections of each kind, alone")
    parser.add_argument("--combined", type=int, default=40, help="and beside others")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--content", choices=["off", "crc32c"], default="crc32c", help="checksums of pages [crc32c]")
    parser.add_argument("--json", action="store_true", help="print the document alone")
    arguments = parser.parse_args()
    plan = SelfTestPlan(
        seed=arguments.seed,
        checks=arguments.checks,
        single=arguments.single,
        combined=arguments.combined,
        content=arguments.content == "crc32c",
    )
    begun = time.monotonic()
    report = self_test(plan)
    show_selftest(report, content=arguments.content, as_json=arguments.json)
    if not arguments.json:
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu_seconds = used.ru_utime + used.ru_stime
        print(f"{time.monotonic() - begun:.0f} s, of them {cpu_seconds:.0f} of CPU; {used.ru_maxrss >> 10} MiB")
    return 0 if report.is_good else 4


if __name__ == "__main__":
    sys.exit(main())
