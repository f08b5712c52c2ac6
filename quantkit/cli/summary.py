"""Markdown of a command's JSON document, one function for each kind: the two cannot disagree."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quantkit.cli import importance_text, needs_text
from quantkit.cli.evaluate_summary import evaluate_summary
from quantkit.cli.gate_summary import gate_summary
from quantkit.cli.markdown import bullets, code, escaped, table
from quantkit.cli.memory_summary import memory_summary
from quantkit.machine import bytes_text, speed_text

Document = Mapping[str, Any]


def summary(document: Document) -> str:
    """A headline with command and status, and below it what is worth a look."""
    is_error = document["status"] == "error"
    body = error_summary if is_error else _SUMMARIES[document["command"]]
    lines = [f"## quantkit {escaped(document['command'])}: {document['status']}", "", *body(document)]
    texts = [line for index, line in enumerate(lines) if line or (index and lines[index - 1])]
    return "\n".join(texts).rstrip("\n") + "\n"


def error_summary(document: Document) -> list[str]:
    """What is wrong, where, and what to do."""
    error = document["error"]
    where = [("file", error["file"]), ("tensor", error["tensor"])]
    return [
        f"**{escaped(error['class'])}**: {escaped(error['message'])}",
        *(line for name, value in where if value for line in ("", f"{name}: {code(value)}")),
        *(["", f"**Remedy**: {escaped(error['remedy'])}"] if error["remedy"] else []),
    ]


def plan_summary(document: Document) -> list[str]:
    """Totals, needs of calibration, parts, what importance covers, tensor-parallel sizes, warnings."""
    recipe, source, output, needs = (document[key] for key in ("recipe", "source", "output", "needs"))
    largest = output["largest_shard"]
    totals = [
        ["source", _count(source["num_tensors"]), bytes_text(source["tensor_bytes"])],
        ["output", _count(output["num_tensors"]), bytes_text(output["tensor_bytes"])],
        ["largest shard", code(largest["name"]), bytes_text(largest["bytes"])],
        ["disk needed", "", bytes_text(needs["disk_bytes"])],
        ["memory needed", "", bytes_text(needs["memory_bytes"])],
    ]
    verdicts = [
        [
            escaped(one["engine"]),
            str(one["tp"]),
            escaped(one["status"]),
            escaped(", ".join(one["kernels"])),
            escaped(one["reason"]),
        ]
        for one in document["tensor_parallel"]
    ]
    return [
        f"{code(document['family'])}, recipe {code(recipe['name'])}: INT4 groups of {recipe['group_size']}, "
        f"{100 * document['quantized_share']:.1f}% of the elements",
        *table(["what", "tensors", "size"], totals),
        *_calibration_needs(needs["calibration"]),
        *table(["part", "source", "action", "weights", "source size", "output size"], _parts(document), num_left=3),
        *_importance(document),
        *table(["engine", "TP", "verdict", "kernels", "why not"], verdicts, num_left=5),
        *bullets("Warnings", document["warnings"]),
    ]


def convert_summary(document: Document) -> list[str]:
    """What was written or, by one of several ranks, made; errors by class, importance, findings, warnings."""
    if "rank" in document:
        return [
            f"Rank {document['rank']} of {document['world_size']}: {_count(document['num_shards'])} shards with "
            f"{_count(document['num_tensors'])} tensors are done in {code(document['partial'])}",
        ]
    speed = speed_text(document["source_bytes"], document["earlier_bytes"], document["seconds"])
    rate = "" if document["calibration"] else f" ({speed})"  # of a run of a model it says nothing
    published = document["published"]
    return [
        f"{code(document['output'])}: {_count(document['num_tensors'])} tensors, "
        f"{bytes_text(document['source_bytes'])} to {bytes_text(document['tensor_bytes'])} in "
        f"{document['seconds']:.1f} s{rate}, verified",
        *([] if published is None else [f"Published: {code(published['url'])}"]),
        *_errors(document),
        *_importance(document),
        *(["", calibration_text(document["calibration"])] if document["calibration"] else []),
        *_findings(document["findings"]),
        *bullets("Warnings", document["warnings"]),
    ]


def calibration_text(calibration: Document) -> str:
    """What chose the codes, and how their errors are to be read."""
    tokens, num_chosen, num_searched = (calibration[key] for key in ("tokens", "num_calibrated", "num_searched"))
    others = f"those of {_count(num_searched)} more" if num_searched else ""
    if calibration["method"] == "awq":
        did = f"scaled {_count(num_chosen)} weights, and the search chose their codes"
        did += f" and {others}" if others else ""
    else:
        did = f"chose the codes of {_count(num_chosen)} weights" + (f", the search {others}" if others else "")
    return (
        f"{calibration['method'].upper()} ({calibration['by']}) over {_count(tokens['num_sequences'])} x "
        f"{_count(tokens['length'])} tokens {did}: it gives up closeness of weights for closeness of outputs, which "
        "quantkit evaluate measures"
    )


def verify_summary(document: Document) -> list[str]:
    """What was checked, errors by class, findings with their remedies."""
    return [
        f"{code(document['output'])}: {_count(document['num_tensors'])} tensors; checked: "
        f"{escaped(', '.join(document['checks']))}",
        *_errors(document),
        *_findings(document["findings"]),
    ]


_SUMMARIES: dict[str, Callable[[Document], list[str]]] = {
    "plan": plan_summary,
    "convert": convert_summary,
    "relayout": convert_summary,
    "verify": verify_summary,
    "memory-plan": memory_summary,
    "gate": gate_summary,
    "evaluate": evaluate_summary,
}


def _parts(document: Document) -> Iterable[list[str]]:
    for part in document["parts"]:
        names = [escaped(part[key]) for key in ("role", "source", "action")]
        sizes = [bytes_text(part[key]) for key in ("source_bytes", "output_bytes")]
        yield [*names, _count(part["num_weights"]), *sizes]


def _errors(document: Document) -> list[str]:
    rows = [
        [
            escaped(one["role"]),
            code(one["worst_weight"]),
            _count(one["num_weights"]),
            f"{one['relative_error']:.4f}",
            f"{one['median_relative_error']:.4f}",
            f"{one['worst_relative_error']:.4f}",
        ]
        for one in document["errors"]
    ]
    columns = ["part", "worst weight", "weights", "relative error", "median", "worst"]
    return table(columns, rows, num_left=2)


def _calibration_needs(needs: Document | None) -> list[str]:
    """What a method that sees inputs will need; nothing for the search."""
    if needs is None:
        return []
    return ["", needs_text.needs_title(needs), *table(needs_text.needs_columns(needs), needs_text.needs_rows(needs))]


def _importance(document: Document) -> list[str]:
    """What second moments cover and, behind a conversion, what they have gained; nothing where there are none."""
    importance = document["importance"]
    if importance is None:
        return []
    gains = table(importance_text.GAIN_COLUMNS, importance_text.gain_rows(importance)) if "errors" in importance else []
    return [
        "",
        f"Importance: {escaped(importance['kind'])}",
        *table(importance_text.COVER_COLUMNS, importance_text.cover_rows(importance)),
        *bullets("No moments", importance_text.missing_texts(importance)),
        *([importance_text.gains_title(importance), *gains] if gains else []),
    ]


def _findings(findings: Iterable[Document]) -> list[str]:
    rows = [
        [
            f"**{one['level']}**" if one["level"] == "error" else escaped(one["level"]),
            escaped(one["check"]),
            code(": ".join(part for part in (one["file"], one["tensor"]) if part)),
            escaped(one["message"]),
            escaped(one["remedy"]),
        ]
        for one in sorted(findings, key=lambda one: one["level"] != "error")
    ]
    return table(["finding", "check", "where", "what", "remedy"], rows, num_left=5)


def _count(number: int) -> str:
    return f"{number:,}"
