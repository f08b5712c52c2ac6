"""Options of `quantkit kv-scales`, checked before anything is read."""

from pathlib import Path

from quantkit.engines.kv_use import KV_SCOPES, KV_SPELLINGS
from quantkit.errors import UsageError
from quantkit.kv_scales.choose import DEFAULT_PERCENTILE, METHODS, check_percentile
from quantkit.kv_scales.make import KvScaleRequest
from quantkit.registry import one_of

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
        method=None if method is None else one_of("--method", method, METHODS),
        percentile=percentile,
        scope=one_of("--per", per, KV_SCOPES),
        spelling=None if spelling is None else one_of("--format", spelling, KV_SPELLINGS),
    )
    return request, one_of("--write-to", write_to, PLACES) == "checkpoint"
