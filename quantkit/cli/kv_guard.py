"""`quantkit kv-guard`: tags of KV pages, seen from outside an engine."""

from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import options as opt
from quantkit.errors import VerificationError, not_installed


class Content(StrEnum):
    """How pages are summed where they are copied."""

    OFF = "off"
    CRC32C = "crc32c"


_group = typer.Typer(help="Try the guard of paged KV caches; read what it found.")


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    app.add_typer(_group, name="kv-guard", no_args_is_help=True)


@_group.command("selftest")
def selftest(
    checks: Annotated[int, typer.Option(min=1, metavar="N", help="Pages to check without a fault.")] = 100_000,
    faults: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Of each kind, inject at least so many faults alone, and at least so many beside others.",
        ),
    ] = 6,
    content: Annotated[
        Content, typer.Option(help="Checksum of a page where it is copied; with it, faults of the content, too.")
    ] = Content.OFF,
    seed: Annotated[int, typer.Option(min=0, help="One seed gives one result.")] = 0,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Leave a sample there of what a guard writes: incidents, a dump, metrics."),
    ] = None,
    as_json: opt.JsonOption = False,
    quiet: opt.QuietOption = False,
) -> None:
    """Simulate a serving engine that breaks its own bookkeeping, and count what the guard sees of it.

    Thousands of requests share a paged cache: prefixes, chunked prefill, speculation, windows, preemption, a second
    tier in the host's memory, prefill in another engine. Each kind of fault is injected alone and beside others; it is
    caught where the guard names it before any token is released that it spoiled.

    With --keep DIR four more faults are injected in a small pool of named requests, and DIR has what a guard writes of
    them: incidents.jsonl for explain, pool.safetensors for inspect, kv.prom. The same for one seed, but for the times.

    Exits with 4 where a fault was missed, or something was named without one.

    Example: quantkit kv-guard selftest --content crc32c
    """
    _check_packages("selftest", "torch", "triton")
    from quantkit.cli import render
    from quantkit.cli.show_kv_guard import show_selftest
    from quantkit.kv_guard.simulation import sample
    from quantkit.kv_guard.simulation.run import SelfTestPlan, self_test
    from quantkit.threads import Stage

    if keep:
        sample.prepare(keep)
    plan = SelfTestPlan(seed=seed, checks=checks, single=faults, combined=faults, content=content is Content.CRC32C)
    with render.progress(is_quiet=quiet) as progress:
        report = self_test(
            plan, lambda what, done, total: progress(Stage(label=what, total_bytes=total, step="part"), done)
        )
    if keep:
        sample.write_sample(keep, seed)
        if not quiet:
            names = ", ".join((sample.INCIDENTS, sample.DUMP, sample.METRICS))
            render.show_notes("quantkit", [f"{keep} has {names}: try kv-guard explain and kv-guard inspect on them"])
    show_selftest(report, content=str(content), as_json=as_json)
    if not report.is_good:
        raise typer.Exit(VerificationError.exit_code)


@_group.command("inspect")
def inspect(
    dump: Annotated[Path, typer.Argument(metavar="DUMP", help="What the guard dumped of a pool (safetensors).")],
    as_json: opt.JsonOption = False,
) -> None:
    """Check the page table, the tags and the expectations of a dumped pool, as the guard does before a step.

    Exits with 4 where a request would read a page that it was not granted, or a tag contradicts itself, and with 3 for
    a file that is no dump, is damaged, or is of another version. Pages that no row expects are listed, and no fault:
    a prefix cache may hold them.

    Example: quantkit kv-guard inspect pool.safetensors
    """
    _check_packages("inspect", "torch", "triton", "safetensors")
    from quantkit.cli.show_kv_guard import show_dump
    from quantkit.kv_guard.dump_reader import read_dump
    from quantkit.kv_guard.dump_report import check_dump

    pool = read_dump(dump)
    report = check_dump(pool)
    show_dump(dump, pool, report, as_json=as_json)
    if not report.is_sound:
        raise typer.Exit(VerificationError.exit_code)


@_group.command("explain")
def explain(
    incidents: Annotated[Path, typer.Argument(metavar="INCIDENT", help="Incident file of the guard (JSON lines).")],
    as_json: opt.JsonOption = False,
) -> None:
    """Say what each incident means: which request, which page, what was expected there and what was found.

    Needs no further package.

    Example: quantkit kv-guard explain incidents.jsonl
    """
    from quantkit.cli.show_kv_guard import show_incidents
    from quantkit.kv_guard.incidents import read_incidents

    show_incidents(incidents, read_incidents(incidents), as_json=as_json)


def _check_packages(command: str, *names: str) -> None:
    """Raise UsageError where one is missing."""
    missing = next((name for name in names if find_spec(name) is None), None)
    if missing:
        raise not_installed(f"kv-guard {command}", missing, extra="kv-guard")
