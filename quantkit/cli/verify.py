"""`quantkit verify`: is an output whole, undamaged, consistent and close to its source?"""

from pathlib import Path
from typing import Annotated, Optional

import typer

from quantkit.cli import options as opt
from quantkit.engines.launch import BACKENDS, Launch
from quantkit.engines.parallel import ENGINES, MOST_GPUS, Parallel
from quantkit.errors import UsageError, VerificationError
from quantkit.registry import one_of


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("verify")(verify)


def verify(
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="The directory that a conversion made.")],
    source: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--source", metavar="SOURCE", help="Compare every value with this source."),
    ] = None,
    engine: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--engine", metavar="|".join(ENGINES), help="Say of every module whether this engine loads it."),
    ] = None,
    tp: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--tp", min=1, metavar="N", help="GPUs that share every layer [default: not looked at]."),
    ] = None,
    ep: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--ep", min=1, metavar="N", help="Groups among them that experts are dealt out to [default: 1]."),
    ] = None,
    dp_attention: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--dp-attention", min=1, metavar="N", help="Replicas of attention among them [default: 1]."),
    ] = None,
    backend: Annotated[
        str, typer.Option("--backend", metavar="|".join(BACKENDS), help="What carries tokens between experts.")
    ] = BACKENDS[0],
    fast: Annotated[bool, typer.Option("--fast", help="Leave out whatever needs dequantizing.")] = False,
    jobs: opt.JobsOption = None,
    quiet: opt.QuietOption = False,
    as_json: opt.JsonOption = False,
    summary: opt.SummaryOption = None,
) -> None:
    """Check an output: hashes, sizes, index, tensors, config; with --source also every value.

    With --engine also whether that engine loads it: what it would refuse, and what it would load silently wrong. Then
    OUTPUT may be another tool's. Exits with 4 when anything is wrong, with 3 when there is no such directory.

    Example: quantkit verify ./glm-5.2-int4 --source ./GLM-5.2-FP8 --engine sglang --tp 8
    """
    launch = _launch(engine, tp=tp, ep=ep, dp_attention=dp_attention, backend=backend)
    from quantkit.cli import render
    from quantkit.cli.show_results import show_verification
    from quantkit.machine import available_cores
    from quantkit.sources import resolve_source
    from quantkit.verify.verify import verify_output

    checkpoint = None if source is None else resolve_source(source).checkpoint
    with render.progress(is_quiet=quiet) as advance:
        report = verify_output(
            output,
            source=checkpoint,
            launch=launch,
            is_fast=fast,
            num_jobs=jobs or available_cores(),
            report_progress=advance,
        )
    show_verification(report, as_json=as_json, summary=summary)
    if not report.is_good:
        if not as_json:
            render.show_notes("quantkit", [report.first_error()])
        raise typer.Exit(VerificationError.exit_code)


def _launch(
    engine: str | None, *, tp: int | None, ep: int | None, dp_attention: int | None, backend: str
) -> Launch | None:
    """Raises UsageError for options that do not go together."""
    name = opt.check_engine_name(engine)
    one_of("--backend", backend, BACKENDS)
    if name is None:
        if any(size is not None for size in (tp, ep, dp_attention)) or backend != BACKENDS[0]:
            raise UsageError(
                "--tp, --ep, --dp-attention and --backend are of an engine", remedy="name it with --engine"
            )
        return None
    if tp is None and (ep is not None or dp_attention is not None):
        raise UsageError("--ep and --dp-attention share the GPUs of --tp", remedy="give --tp, too")
    if tp is not None and tp > MOST_GPUS:
        raise UsageError(f"--tp {tp} are more GPUs than there are", remedy=f"give at most {MOST_GPUS}")
    parallel = None if tp is None else Parallel(tp=tp, ep=ep or 1, dp_attention=dp_attention or 1)
    return Launch(engine=name, parallel=parallel, backend=backend)
