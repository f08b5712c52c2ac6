"""One line of a sample log: lm-evaluation-harness's, or ``{"id", "correct"}`` and perhaps ``"task"``."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import SourceError

NO_FILTER = "none"  # as the harness calls it
# what the harness writes beside metrics
_STRUCTURE = {
    *("id", "task", "doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics"),
    *("doc_hash", "prompt_hash", "target_hash", "scores_per_repeat", "error"),
}
_DOCUMENT_HASHES = ("doc_hash", "target_hash")
_BOOLEANS = {"True": 1.0, "False": 0.0}  # numpy's, as the harness writes them
_LOG_REMEDY = "give logs of lm_eval --log_samples, or lines of id and correct"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one side made of one question; ``metrics`` as written, ``document`` hashes of question and answer."""

    task: str
    filter: str
    id: str
    metrics: Mapping[str, object]
    document: Mapping[str, str]
    prompt: str | None
    path: Path
    line: int

    @property
    def place(self) -> str:
        """File and line."""
        return place(self.path, self.line)

    def score(self, metric: str) -> float:
        """In [0, 1]. Raises SourceError where the metric is missing or no such number."""
        if metric not in self.metrics:
            raise SourceError(
                f"id {self.id}: there is no metric {metric}, only {', '.join(self.metrics) or 'none'}",
                file=self.place,
                remedy="name one that every line has with --metric",
            )
        value = self.metrics[metric]
        if isinstance(value, str) and value in _BOOLEANS:
            return _BOOLEANS[value]
        if isinstance(value, bool | int | float) and 0 <= value <= 1:  # NaN is not
            return float(value)
        raise SourceError(
            f"id {self.id}: {metric} is {str(value)[:50]}, neither 0 or 1 nor a number between",
            file=self.place,
            remedy="name a metric of single questions with --metric",
        )


def place(path: Path, line: int) -> str:
    """How an error names a line."""
    return f"{path}:{line}"


def parse_sample(raw: bytes, path: Path, line: int, task: str) -> Sample:
    """A line, whose own ``task`` goes before that of the file. Raises SourceError with file and line."""
    try:
        fields = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_unique)
        if b"\\ud" in raw.lower():
            json.dumps(fields, ensure_ascii=False).encode()  # a lone surrogate cannot be printed
        document = _document(fields) if isinstance(fields, dict) else {}
    except (ValueError, RecursionError) as error:
        raise SourceError(f"is not JSON ({error})", file=place(path, line), remedy=_LOG_REMEDY) from error
    if not isinstance(fields, dict):
        raise SourceError("is not a JSON object", file=place(path, line), remedy=_LOG_REMEDY)
    own_task, filter_ = fields.get("task", task), fields.get("filter", NO_FILTER)
    if not isinstance(own_task, str) or not isinstance(filter_, str):
        raise SourceError("task or filter is no text", file=place(path, line), remedy=_LOG_REMEDY)
    prompt = fields.get("prompt_hash")
    return Sample(
        task=own_task,
        filter=filter_,
        id=_id(fields, place(path, line)),
        metrics={name: _scalar(value) for name, value in fields.items() if name not in _STRUCTURE},
        document=document,
        prompt=prompt if isinstance(prompt, str) else None,
        path=path,
        line=line,
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key stands twice")
    return fields


def _id(fields: Mapping[str, Any], where: str) -> str:
    value = fields.get("doc_id", fields.get("id"))
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise SourceError("has no id: neither doc_id nor id is a number or a text", file=where, remedy=_LOG_REMEDY)
    return str(value)


def _scalar(value: object) -> object:
    """Lists and objects are no metric of ours: a word of them is kept for an error."""
    return value if isinstance(value, bool | int | float) else str(value)[:50]


def _document(fields: Mapping[str, Any]) -> dict[str, str]:
    """Logs that are older than its hash hold the document."""
    document = {name: value for name in _DOCUMENT_HASHES if isinstance(value := fields.get(name), str)}
    if "doc_hash" not in document and "doc" in fields:
        canonical = json.dumps(fields["doc"], sort_keys=True).encode()
        document["doc"] = hashlib.sha256(canonical).hexdigest()
    return document
