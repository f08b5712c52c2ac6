"""What `quantkit evaluate` says of its document, in words that terminal, summary and page share."""

from collections.abc import Mapping
from typing import Any

from quantkit.machine import bytes_text

Document = Mapping[str, Any]

FIGURE_COLUMNS = ("figure", "value", "standard error")
ERROR_COLUMNS = ("part", "weights", "relative error", "median", "worst", "worst weight")
_NOTABLE = 0.1  # of the largest error
SIZE_COLUMNS = ("part", "source", "output", "output / source")


def headline(document: Document) -> str:
    """What was run over what."""
    model, tokens, run = document["model"], document["tokens"], document["run"]
    return (
        f"{model['model_type']}, {model['num_layers']} layers; {tokens['num_sequences']:,} sequences of "
        f"{tokens['length']:,} tokens of {tokens['file']}; {run['dtype']} on {run['device']}"
    )


def figure_rows(document: Document) -> list[list[str]]:
    """Every figure of the predictions, with its standard error where it has one."""
    perplexity, kl, shift = document["perplexity"], document["kl_divergence"], document["top_probability_shift"]
    return [
        ["perplexity of the source", f"{perplexity['source']:.4f}", ""],
        ["perplexity of the output", f"{perplexity['output']:.4f}", ""],
        ["perplexity ratio", f"{perplexity['ratio']:.5f}", error_text(perplexity["ratio_standard_error"], "{:.5f}")],
        ["KL divergence, mean", f"{kl['mean']:.3g}", error_text(kl["standard_error"], "{:.2g}")],
        *([f"KL divergence, {name}", f"{kl[key]:.3g}", ""] for name, key in QUANTILES),
        [
            "top-1 agreement",
            f"{100 * document['top1_agreement']:.2f}%",
            error_text(document["top1_agreement_standard_error"], "{:.2f}%", scale=100),
        ],
        ["top token's probability, RMS shift", f"{100 * shift['rms']:.3g}%", ""],
        ["top token's probability, mean shift", f"{100 * shift['mean']:+.3g}%", ""],
    ]


QUANTILES = (("median", "median"), ("90%", "p90"), ("99%", "p99"), ("99.9%", "p99_9"), ("maximum", "max"))


def error_text(value: float | None, form: str, *, scale: float = 1.0) -> str:
    """A standard error; nothing where none is known."""
    return "" if value is None else form.format(scale * value)


def layer_columns(document: Document) -> list[str]:
    """Of the table of layers; weights by part, of those parts that differ most."""
    return ["layer", "hidden states", "expert outputs", *(f"{part} weights" for part in _notable_parts(document))]


def layer_rows(document: Document) -> list[list[str]]:
    """Relative errors behind every layer."""
    parts = _notable_parts(document)
    return [
        [
            str(one["layer"]),
            _relative(one["hidden_error"]),
            _relative(one["expert_error"]),
            *(_relative(one["weight_errors"].get(part)) for part in parts),
        ]
        for one in document["layers"]
    ]


def changed_parts(document: Document) -> list[str]:
    """Parts whose weights differ from the source's, the most different first."""
    changed = [one for one in document["errors"] if one["relative_error"] > 0]
    in_layers = {part for one in document["layers"] for part in one["weight_errors"]}
    ordered = sorted(changed, key=lambda one: -one["relative_error"])
    return [one["role"] for one in ordered if one["role"] in in_layers]


def _notable_parts(document: Document) -> list[str]:
    errors = {one["role"]: one["relative_error"] for one in document["errors"]}
    parts = changed_parts(document)
    return [part for part in parts if errors[part] >= _NOTABLE * errors[parts[0]]]


def error_rows(document: Document) -> list[list[str]]:
    """Weight errors by part."""
    return [
        [
            one["role"],
            f"{one['num_weights']:,}",
            *(_relative(one[key]) for key in ("relative_error", "median_relative_error", "worst_relative_error")),
            one["worst_weight"] if one["worst_relative_error"] else "",
        ]
        for one in document["errors"]
    ]


def size_rows(document: Document) -> list[list[str]]:
    """Bytes by part, and of all."""
    sizes = [(one["role"], one["source_bytes"], one["output_bytes"]) for one in document["sizes"]]
    total = ("all", sum(one[1] for one in sizes), sum(one[2] for one in sizes))
    return [
        [role, bytes_text(source), bytes_text(output), f"{output / source:.3f}" if source else "-"]
        for role, source, output in (*sizes, total)
    ]


def verdict_text(document: Document) -> str:
    """The figures that decide, and whether what was asked for is met."""
    kl, ratio = document["kl_divergence"], document["perplexity"]["ratio"]
    figures = (
        f"KL divergence {kl['mean']:.3g} (99%: {kl['p99']:.3g}), top-1 agreement "
        f"{100 * document['top1_agreement']:.2f}%, perplexity x {ratio:.5f}"
    )
    if document["failures"]:
        return f"{figures}: {'; '.join(document['failures'])}"
    is_asked = any(value is not None for value in document["criteria"].values())
    return f"{figures}: within what was asked for" if is_asked else figures


def _relative(value: float | None) -> str:
    return "-" if value is None else f"{value:.5f}"
