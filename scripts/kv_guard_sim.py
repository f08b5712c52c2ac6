"""Try to break the KV guard, at length: millions of page checks without a fault, and hundreds of faults.

    scripts/kv_guard_sim.py --checks 10000000 --single 40 --combined 40

`quantkit kv-guard selftest` does the same in less than a minute. One seed gives one result, but for the times.
"""

import argparse
import json
import resource
import sys
import time

from quantkit.kv_guard.simulation.report import MOMENTS, KindCount, SelfTestReport
from quantkit.kv_guard.simulation.run import SelfTestPlan, self_test


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", type=int, default=10_000_000, help="of pages, without faults")
    parser.add_argument("--single", type=int, default=40, help="injections of each kind, alone")
    parser.add_argument("--combined", type=int, default=40, help="and beside others")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the document alone")
    arguments = parser.parse_args()
    plan = SelfTestPlan(
        seed=arguments.seed, checks=arguments.checks, single=arguments.single, combined=arguments.combined
    )
    begun = time.monotonic()
    report = self_test(plan)
    if arguments.json:
        print(json.dumps(report.document(), indent=2))
    else:
        print_report(report)
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu_seconds = used.ru_utime + used.ru_stime
        print(f"{time.monotonic() - begun:.0f} s, of them {cpu_seconds:.0f} of CPU; {used.ru_maxrss >> 10} MiB")
    return 0 if report.is_good else 4


def print_report(report: SelfTestReport) -> None:
    """A line for each kind, and what was said or read without one."""
    print(f"{'kind':>4}  {'':52} injected  caught  missed  harmless  seen first")
    for kind in report.kinds:
        name = str(kind.document()["name"])
        figures = f"{kind.injected:8}  {kind.caught:6}  {kind.missed:6}  {kind.harmless:8}"
        print(f"{kind.kind:>4}  {name:52} {figures}  {seen_first(kind)}")
    print(f"{report.clean_checks:,} page checks without a fault, {report.checks:,} in all, {report.steps:,} steps")
    print(f"{len(report.false_positives)} false positives, {len(report.leaks)} wrong reads without a fault")
    for text in [*report.false_positives, *report.leaks][:20]:
        print("  " + text)


def seen_first(kind: KindCount) -> str:
    """By which checks, and how often."""
    return ", ".join(f"{MOMENTS[check]} {kind.when[check]}" for check in MOMENTS if kind.when[check])


if __name__ == "__main__":
    sys.exit(main())
