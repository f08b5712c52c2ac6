"""Shows what a calibration saw, as JSON or as tables."""

from typing import Any

from quantkit.calibrate.report import QUANTILES, CalibrateReport, ExpertCoverage
from quantkit.cli import render
from quantkit.cli.document import head

_MOST_NAMES = 8


def show_calibration(report: CalibrateReport, *, as_json: bool) -> None:
    """Experts that saw too little come as warnings: what is done without them stands there."""
    if as_json:
        render.show_json(calibrate_document(report))
        return
    columns = ["experts", "number", "fewest tokens", "median", "most", "without"]
    rows = [
        [
            one.experts,
            str(one.num_experts),
            str(one.least),
            f"{one.median:.0f}",
            str(one.most),
            str(len(one.unvisited)),
        ]
        for one in report.experts
    ]
    render.show_table("Tokens of routed experts", columns, rows)
    columns = ["attention", "part", "rows", "largest", *(f"{100 * share:g}%" for share in QUANTILES)]
    rows = [
        [one.attention, one.part, str(one.num_rows), f"{one.largest:.4g}", *(f"{value:.4g}" for value in one.quantiles)]
        for one in report.cache
    ]
    render.show_table("Magnitudes in the KV cache", columns, rows)
    num_tokens = report.num_sequences * report.length
    render.show_line(f"{report.num_linears} modules outside the experts, {num_tokens:,} tokens: {report.path}")
    render.show_notes("warning", [_without(one) for one in report.experts if one.unvisited])


def _without(one: ExpertCoverage) -> str:
    names = ", ".join(map(str, one.unvisited[:_MOST_NAMES]))
    more = f" and {len(one.unvisited) - _MOST_NAMES} more" if len(one.unvisited) > _MOST_NAMES else ""
    return f"{one.experts}: no token chose expert {names}{more}; importance takes the mean of the layer for these"


def calibrate_document(report: CalibrateReport) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        **head("calibrate"),
        "output": str(report.path),
        "model": report.model,
        "tokens": {"sha256": report.tokens, "num_sequences": report.num_sequences, "length": report.length},
        "num_linears": report.num_linears,
        "experts": [
            {
                "name": one.experts,
                "num_experts": one.num_experts,
                "tokens": {"fewest": one.least, "median": one.median, "most": one.most},
                "unvisited": list(one.unvisited),
            }
            for one in report.experts
        ],
        "cache": [
            {
                "attention": one.attention,
                "part": one.part,
                "num_rows": one.num_rows,
                "largest": one.largest,
                "quantiles": {f"{share:g}": value for share, value in zip(QUANTILES, one.quantiles, strict=True)},
            }
            for one in report.cache
        ],
    }
