"""Options of `quantkit kv-scales`, checked before anything is read."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from quantkit.engines.kv_use import KV_SCOPES, KV_SPELLINGS
from quantkit.errors import UsageError
from quantkit.kv_scales.choose import DEFAULT_PERCENTILE, METHODS, check_percentile
from quantkit.kv_scales.make import KvScaleRequest

_Word = TypeVar("_Word", bound=str)
PLACES = ("sidecar", "checkpoint")


def requests_of(
    *,
    statistics: Path | None,
    method: str | None,
    percentile: float | None,
    per: str,
    spelling: str | None,
    write_to: str,
) -> tuple[KvScaleRequest, bool]:
    """What is asked for, and whether it goes into a checkpoint. Raises UsageError for a word that is not known."""
    if percentile is not None and method != "percentile":
        raise UsageError("--percentile is of --method percentile", remedy="give that, or leave --percentile out")
    percentile = DEFAULT_PERCENTILE if percentile is None else percentile
    check_percentile(percentile)
    request = KvScaleRequest(
        statistics=statistics,
        method=None if method is None else _known("--method", method, METHODS),
        percentile=percentile,
        scope=_known("--per", per, KV_SCOPES),
        spelling=None if spelling is None else _known("--format", spelling, KV_SPELLINGS),
    )
    return request, _known("--write-to", write_to, PLACES) == "checkpoint"


def _known(option: str, word: str, words: Sequence[_Word]) -> _Word:
    found = next((one for one in words if one == word), None)
    if found is None:
        raise UsageError(f"{option} {word} is not known", remedy=f"choose {', '.join(words)}")
    return found
