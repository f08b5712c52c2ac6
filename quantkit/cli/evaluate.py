"""`quantkit evaluate`: how far do an output's predictions lie from its source's?"""

import math
from pathlib import Path
from typing import Annotated, Optional

import typer

from quantkit.cli import options as opt
from quantkit.cli import running
from quantkit.cli.fetching import KeepSourceOption
from quantkit.cli.groups import grouped
from quantkit.errors import UsageError, VerificationError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("evaluate")(grouped(evaluate))


def evaluate(
    source: opt.SourceArgument,
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="A directory with another form of the same model.")],
    tokens: running.TokenOptions,
    dtype: running.DtypeOption = "float32",
    device: running.ModelDeviceOption = "cpu",
    work: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--work", metavar="DIR", help="Keep hidden states in files there [default: in memory if few]."),
    ] = None,
    report: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--report", metavar="FILE.html", help="Write one self-contained page with charts, too."),
    ] = None,
    max_kl: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--max-kl", min=0.0, metavar="NATS", help="Fail where the mean KL divergence is above."),
    ] = None,
    min_top1: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--min-top1", min=0.0, max=1.0, metavar="SHARE", help="Fail where top-1 agreement is below."),
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Leave out the errors of weights.")] = False,
    allow_other_model: Annotated[
        bool, typer.Option("--allow-other-model", help="Compare models whose norms differ, if their sizes agree.")
    ] = False,
    keep_source: KeepSourceOption = False,
    jobs: opt.JobsOption = None,
    quiet: opt.QuietOption = False,
    as_json: opt.JsonOption = False,
    summary: opt.SummaryOption = None,
) -> None:
    """Run a source and an output over the same tokens, layer by layer, and compare what they predict.

    Perplexity, KL divergence and agreement of the predictions, errors behind every layer, of weights, and sizes. Two
    layers are in memory, never a model. Exits with 4 where a threshold is missed, with 3 for two models.

    Example: quantkit evaluate ./GLM-5.2-FP8 ./glm-5.2-int4 --text book.txt --sequences 16 --report evaluation.html
    """
    options = running.RunOptions(what="evaluate", tokens=tokens, dtype=dtype, device=device, keep_source=keep_source)
    for option, limit in (("--max-kl", max_kl), ("--min-top1", min_top1)):
        if limit is not None and math.isnan(limit):
            raise UsageError(
                f"{option} nan is no limit: nothing would miss it", remedy="give a number, or leave it out"
            )
    options.check()
    if report is not None:
        from quantkit.cli.evaluate_page import PAGE_BEGIN
        from quantkit.cli.page_file import check_page

        check_page(report, is_ours=PAGE_BEGIN, option="--report")
    from quantkit.checkpoint.source import open_checkpoint
    from quantkit.cli import render
    from quantkit.cli.evaluate_document import Settings, evaluate_document
    from quantkit.cli.show_evaluation import show_evaluation
    from quantkit.evaluate.criteria import Criteria
    from quantkit.evaluate.report import Request, make_report
    from quantkit.evaluate.run import Pair
    from quantkit.machine import available_cores

    request = Request(
        work=work,
        beside=Path.cwd() if report is None else report.parent,
        is_fast=fast,
        allow_other_model=allow_other_model,
        num_jobs=jobs or available_cores(),
    )
    other = options.open_checkpoint(open_checkpoint(output))
    model = options.open_source(source)
    pair = Pair(model, other)
    found = running.read_tokens_of(model, tokens)
    with render.progress(is_quiet=quiet) as advance:
        made = make_report(pair, found, request, report_progress=advance)
    settings = Settings(
        source=source, output=str(output), file=str(tokens.text or tokens.tokens), dtype=dtype, device=device
    )
    document = evaluate_document(made, settings, Criteria(max_kl=max_kl, min_top1=min_top1))
    show_evaluation(document, page=report, as_json=as_json, summary=summary)
    if document["failures"]:
        raise typer.Exit(VerificationError.exit_code)
