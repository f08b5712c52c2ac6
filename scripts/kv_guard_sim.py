#!/usr/bin/env python
"""Try to break the KV guard, at length: millions of page checks without a fault, and hundreds of faults.

    scripts/kv_guard_sim.py --checks 10000000 --single 40 --combined 40
    scripts/kv_guard_sim.py --mutants    # guards that each lack one thing: what the self-test has to say of them

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
from quantkit.kv_guard.simulation.mutants import MUTANTS
from quantkit.kv_guard.simulation.run import SelfTestPlan, faults_alone, self_test


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", type=int, default=10_000_000, help="of pages, without faults")
    parser.add_argument("--single", type=int, default=40, help="injections of each kind, alone")
    parser.add_argument("--combined", type=int, default=40, help="and beside others")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--content", choices=["off", "crc32c"], default="crc32c", help="checksums of pages [crc32c]")
    parser.add_argument("--mutants", action="store_true", help="faults alone, of guards that lack something")
    parser.add_argument("--json", action="store_true", help="print the document alone")
    arguments = parser.parse_args()
    if arguments.mutants:
        return _show_mutants(arguments.seed, arguments.single)
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


def _show_mutants(seed: int, single: int) -> int:
    """A line each: what was missed of each kind (and of it, what was only late), and named without a fault."""
    unnoticed = []
    for name, mutant in MUTANTS.items():
        plan = SelfTestPlan(seed=seed, single=single, combined=0, content=True)
        report = faults_alone(plan, mutant.make)
        missed = [f"{one.kind}: {one.missed} of {one.injected} ({one.late} late)" for one in report.kinds if one.missed]
        wrong = f"{len(report.false_positives)} false positives, {len(report.leaks)} leaks"
        print(f"{name}: {', '.join(missed) or 'none missed'}; {wrong}", flush=True)
        if report.is_good:
            unnoticed.append(name)
    print(f"not noticed: {', '.join(unnoticed) or 'none'}")
    return 4 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
