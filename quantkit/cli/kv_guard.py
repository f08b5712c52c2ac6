"""`quantkit kv-guard`: tags of KV pages, seen from outside an engine."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import options as opt
from quantkit.errors import UsageError, VerificationError

_group = typer.Typer(help="Tags of KV pages: try them, look at a dumped pool, explain what was found.")


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    app.add_typer(_group, name="kv-guard", no_args_is_help=True)


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
    _check_packages()
    from quantkit.cli.show_kv_guard import show_dump
    from quantkit.kv_guard.dump import check_dump, read_dump

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

    Example: quantkit kv-guard explain incidents.jsonl
    """
    _check_packages()
    from quantkit.cli.show_kv_guard import show_incidents
    from quantkit.kv_guard.incidents import read_incidents

    show_incidents(incidents, read_incidents(incidents), as_json=as_json)


def _check_packages() -> None:
    """Raise UsageError where what a serving image has is missing."""
    missing = next((name for name in ("torch", "triton", "safetensors") if find_spec(name) is None), None)
    if missing:
        raise UsageError(f"kv-guard needs {missing}", remedy="pip install 'quantkit[kernels]'")
