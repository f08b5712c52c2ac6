"""An evaluation as one HTML page: no script, nothing loaded, the same text for the same document."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from quantkit.cli import evaluate_text as text
from quantkit.cli.evaluate_charts import NUM_SERIES, Bar, Series, bar_chart, histogram_chart, line_chart, size_bar
from quantkit.cli.page_file import page_begin, style

Document = Mapping[str, Any]

PAGE_BEGIN = page_begin("Evaluation of ")
_SIGNS = {"ok": "M3 9l4 5 8-10", "failed": "M4 4l10 10M14 4L4 14"}  # beside the words


def evaluate_page(document: Document) -> str:
    """The page of an evaluate document."""
    title = f"{_short_name(document['output'])} against {_short_name(document['source'])}"
    names = "".join(
        f"<dt>{term}</dt><dd>{escape(str(value))}</dd>"
        for term, value in (
            ("Source", document["source"]),
            ("Output", document["output"]),
            ("Model", f"{document['model']['model_type']}, {document['model']['num_layers']} layers"),
            ("Tokens", f"{document['tokens']['file']}: {_tokens(document)}"),
            ("Run in", f"{document['run']['dtype']} on {document['run']['device']}, layer by layer"),
        )
    )
    figures = _table("Of the predictions", text.FIGURE_COLUMNS, text.figure_rows(document))
    layers = _table("Relative errors", text.layer_columns(document), text.layer_rows(document))
    return f"""{PAGE_BEGIN}{escape(title)}</title><style>
{style("evaluate_page.css")}</style></head>
<body><main><header><p class="eyebrow">Evaluation</p><h1>{escape(title)}</h1>
<p class="note">Both were run over the same tokens; errors are the output's, relative to the source.</p></header>
<section><h2>Predictions</h2>{_verdict(document)}{_tiles(document)}
<dl class="settings">{names}</dl>{_list("Warnings", document["warnings"])}</section>
<div class="columns"><section><h2>Divergence</h2>{_histogram(document)}</section>
<section><h2>All figures</h2>{figures}</section></div>
<section><h2>Errors by layer</h2>{_layer_charts(document)}</section>
<div class="columns">{_weights(document)}<section><h2>Sizes</h2>{_sizes(document)}</section></div>
<section><h2>Every part</h2>{_parts(document)}</section>
<section><h2>Every layer</h2>{layers}</section>
<footer><p>{escape(f"quantkit {document['version']}, {document['command']}, status {document['status']}")}.
Relative error: root of the summed squared differences, of the summed squares of the source.</p></footer>
</main></body></html>
"""


def _short_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or path


def _tokens(document: Document) -> str:
    tokens = document["tokens"]
    return (
        f"{tokens['num_sequences']:,} sequences of {tokens['length']:,}, {tokens['num_predictions']:,} predictions "
        f"(sha256 {tokens['sha256'][:12]})"
    )


def _verdict(document: Document) -> str:
    """Only where something was asked for."""
    if all(value is None for value in document["criteria"].values()):
        return ""
    words = "; ".join(document["failures"]) or "within what was asked for"
    return f"""<p class="verdict {document["status"]}"><svg width="18" height="18" aria-hidden="true">
<path d="{_SIGNS[document["status"]]}"/></svg><span class="unseen">Verdict: </span>{escape(words)}</p>"""


def _tiles(document: Document) -> str:
    perplexity, kl = document["perplexity"], document["kl_divergence"]
    shift = document["top_probability_shift"]
    tiles = (
        ("KL divergence", f"{kl['mean']:.3g}", _within("mean, in nats", kl["standard_error"], "{:.2g}")),
        ("KL divergence, 99%", f"{kl['p99']:.3g}", f"median {kl['median']:.2g}, maximum {kl['max']:.3g}"),
        (
            "Top-1 agreement",
            f"{100 * document['top1_agreement']:.2f}%",
            _within("of predictions", document["top1_agreement_standard_error"], "{:.2f}%", scale=100),
        ),
        (
            "Perplexity",
            f"x {perplexity['ratio']:.5f}",
            _within(
                f"{perplexity['source']:.3f} to {perplexity['output']:.3f}",
                perplexity["ratio_standard_error"],
                "{:.5f}",
                of=" of the ratio",
            ),
        ),
        ("Top token's probability", f"{100 * shift['rms']:.2f}%", "RMS shift of the source's likeliest token"),
    )
    boxes = "".join(f"<div><dt>{name}</dt><dd>{value}</dd><dd>{note}</dd></div>" for name, value, note in tiles)
    return f'<dl class="tiles">{boxes}</dl>'


def _within(words: str, standard_error: float | None, form: str, *, scale: float = 1.0, of: str = "") -> str:
    error = text.error_text(standard_error, form, scale=scale)
    return f"{words}; standard error{of} {error}" if error else words


def _histogram(document: Document) -> str:
    histogram = document["kl_histogram"]
    note = "Predictions by their KL divergence in nats, on a logarithmic axis."
    if histogram["below"]:
        note += f" {histogram['below']:,} more lie below, zero among it."
    return histogram_chart("KL divergence", note, histogram["edges"], histogram["counts"])


def _layer_charts(document: Document) -> str:
    layers = document["layers"]
    numbers = [one["layer"] for one in layers]

    def series(name: str, key: str) -> Series:
        return Series(name=name, values={one["layer"]: one[key] for one in layers if one[key] is not None})

    states = [series("hidden states", "hidden_error"), series("expert outputs", "expert_error")]
    parts = [
        Series(
            name=f"{_words(part)} weights",
            values={one["layer"]: one["weight_errors"][part] for one in layers if part in one["weight_errors"]},
        )
        for part in text.changed_parts(document)[:NUM_SERIES]
    ]
    note = "Relative RMS error behind each layer; what went wrong before a layer counts."
    charts = line_chart("Activations", note, [one for one in states if one.values], numbers)
    if parts:
        note = "Relative error of what each layer holds, by part, on a logarithmic axis."
        charts += line_chart("Weights", note, parts, numbers, is_logarithmic=True)
    return charts


def _weights(document: Document) -> str:
    if not document["errors"]:
        return ""
    bars = [
        Bar(name=_words(one["role"]), values=(one["relative_error"],), words=(f"{one['relative_error']:.5f}",))
        for one in sorted(document["errors"], key=lambda one: -one["relative_error"])
        if one["relative_error"] > 0
    ]
    same = [_words(one["role"]) for one in document["errors"] if one["relative_error"] == 0]
    note = f"The same in both: {', '.join(same)}." if same else ""
    return f"<section><h2>Weights</h2>{bar_chart('Relative error by part', note, bars, ())}</section>"


def _sizes(document: Document) -> str:
    bars = [size_bar(_words(one["role"]), one["source_bytes"], one["output_bytes"]) for one in document["sizes"]]
    return bar_chart("Stored bytes by part", "KiB, MiB and GiB: powers of 1,024.", bars, ("source", "output"))


def _parts(document: Document) -> str:
    """The numbers behind both charts, at the width of the page."""
    errors = [row[:-1] for row in text.error_rows(document)]
    tables = _table("Errors of weights", text.ERROR_COLUMNS[:-1], errors) if errors else ""
    return tables + _table("Stored bytes", text.SIZE_COLUMNS, text.size_rows(document))


def _words(part: str) -> str:
    return part.replace("_", " ")


def _table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column names the row."""
    head = "".join(f'<th scope="col">{escape(_words(one))}</th>' for one in columns)
    body = "".join(
        f'<tr><th scope="row">{escape(_words(name))}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in rows
    )
    return f"""<div class="scroll" role="group" tabindex="0" aria-label="{caption}"><table><caption>{caption}</caption>
<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>
"""


def _list(title: str, texts: Sequence[str]) -> str:
    if not texts:
        return ""
    items = "".join(f"<li>{escape(one)}</li>" for one in texts)
    return f"<h3>{title}</h3><ul>{items}</ul>"
