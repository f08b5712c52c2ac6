"""`quantkit gate`: has an evaluation become worse than is allowed?"""

from pathlib import Path
from typing import Annotated, Optional

import typer

from quantkit.cli import options as opt
from quantkit.errors import VerificationError

_LOG_HELP = "Sample log (*.jsonl) or a directory of them"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("gate")(gate)


def gate(
    baseline: Annotated[Path, typer.Argument(metavar="BASELINE", help=f"{_LOG_HELP}: of the model as it was.")],
    candidate: Annotated[Path, typer.Argument(metavar="CANDIDATE", help=f"{_LOG_HELP}: of the model that is judged.")],
    max_drop: Annotated[
        float, typer.Option("--max-drop", metavar="POINTS", help="Percentage points that may be lost, 0.8 say.")
    ],
    point: Annotated[bool, typer.Option("--point", help="Judge the observed drop, not its upper bound.")] = False,
    confidence: Annotated[
        float, typer.Option("--confidence", metavar="SHARE", help="Of the one-sided upper bound.")
    ] = 0.95,
    metric: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--metric",
            metavar="NAME",
            help="What is compared [default: the first of acc_norm, acc, exact_match, correct that a task has]. "
            "Repeatable: the first that a task has.",
        ),
    ] = None,
    task: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--task", metavar="TASK[/FILTER]", help="Only these; mmlu_* stands for all that match. Repeatable."
        ),
    ] = None,
    per_task: Annotated[bool, typer.Option("--per-task", help="Each task must pass, not the mean of all.")] = False,
    pooled: Annotated[
        bool, typer.Option("--pooled", help="In the mean count every question the same, not every task.")
    ] = False,
    allow_unpaired: Annotated[
        bool, typer.Option("--allow-unpaired", help="Compare the questions that both have, where some are in one only.")
    ] = False,
    as_json: opt.JsonOption = False,
    summary: opt.SummaryOption = None,
) -> None:
    """Compare two evaluations question by question: pass where the accuracy lost is shown to be within --max-drop.

    Reads what lm_eval --log_samples writes, and lines of {"id": ..., "correct": 0 or 1}. Shown means: the upper bound
    of the drop is within. Exits with 4 when it is not, with 3 for logs that cannot be compared.

    Example: quantkit gate evals/fp8 evals/int4 --max-drop 0.8
    """
    from quantkit.cli.show_gate import show_gate
    from quantkit.gate.gate import Criterion, check_criterion, judge
    from quantkit.gate.pairs import pair_logs
    from quantkit.gate.sample_log import check_two_logs, read_log

    criterion = Criterion(
        max_drop=max_drop, confidence=confidence, is_point=point, is_per_task=per_task, is_pooled=pooled
    )
    check_criterion(criterion)
    logs = read_log(baseline), read_log(candidate)
    check_two_logs(*logs)
    pairing = pair_logs(*logs, tasks=task or (), metrics=metric or (), allow_unpaired=allow_unpaired)
    report = judge(pairing, criterion)
    show_gate(report, (baseline, candidate), as_json=as_json, summary=summary)
    if not report.passes:
        raise typer.Exit(VerificationError.exit_code)
