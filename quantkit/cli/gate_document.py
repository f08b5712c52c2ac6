"""The JSON document of `quantkit gate`; its schema says the same and is tested."""

from pathlib import Path
from typing import Any

from quantkit.cli.document import head
from quantkit.gate.gate import POWER, Comparison, GateReport
from quantkit.gate.paired import ADDED_PAIRS, NUM_RESAMPLES, SEED, normal_quantile


def gate_document(report: GateReport, logs: tuple[Path, Path]) -> dict[str, Any]:
    """The criterion, every task, the mean, the verdict."""
    criterion = report.criterion
    return {
        **head("gate", "ok" if report.passes else "failed"),
        "baseline": str(logs[0]),
        "candidate": str(logs[1]),
        "criterion": {
            "max_drop": criterion.max_drop,
            "confidence": criterion.confidence,
            "judged": "observed drop" if criterion.is_point else "upper bound",
            "of": "each task" if criterion.is_per_task else "mean",
            "mean_over": "questions" if criterion.is_pooled else "tasks",
        },
        "bootstrap": {
            "num_resamples": NUM_RESAMPLES,
            "seed": SEED,
            "added_pairs": 2 * ADDED_PAIRS,
            "power": POWER,
            "z": normal_quantile(criterion.confidence),
        },
        "overall": _comparison(report.overall),
        "tasks": [
            {
                "task": one.pairs.task,
                "filter": one.pairs.filter,
                "metric": one.pairs.metric,
                **_comparison(one.comparison),
            }
            for one in report.tasks
        ],
        "num_unpaired": report.num_unpaired,
        "warnings": list(report.warnings),
    }


def _comparison(one: Comparison) -> dict[str, Any]:
    return {
        "num_questions": one.num_questions,
        "baseline": one.baseline,
        "candidate": one.candidate,
        "change": one.change,
        "interval": [one.low, one.high],
        "drop_bound": 0.0 - one.low,
        "num_lost": one.num_lost,
        "num_gained": one.num_gained,
        "mcnemar_p": one.mcnemar_p,
        "questions_needed": {
            "even_chance": one.needed.even_chance,
            "likely": one.needed.likely,
            "at_observed": one.needed.at_observed,
        },
        "verdict": one.verdict.value,
    }
