"""The HTML page of an evaluation: what it says, that it loads nothing, and how a real browser draws it."""

import copy
import json
import math
import re
import struct
import zlib
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import jsonschema
import pytest

import quantkit.cli
from quantkit.cli.evaluate_page import evaluate_page
from quantkit.machine import bytes_text
from tests.browser import Reader, dump_dom, look, screenshot
from tests.cli.test_memory_page import contrast

HOSTILE = """<script>alert(1)</script>'"><img src=x onerror=alert(1)>&amp;"""
ROLES = {"routed_expert": 0.081, "attention": 0.0016, "norm": 0.0}


def made_up(num_layers=78):
    """A document as the command makes one of a large model."""
    edges = [10 ** (-8 + index / 4) for index in range(21)]
    layers = [
        {
            "layer": layer,
            "hidden_error": 0.002 + 0.001 * layer,
            "expert_error": None if layer < 3 else 0.08 + 0.02 * math.sin(layer),
            "weight_errors": {"attention": 0.0016, "norm": 0.0} | ({} if layer < 3 else {"routed_expert": 0.081}),
        }
        for layer in range(num_layers)
    ]
    return {
        "command": "evaluate",
        "version": "1.2.3",
        "status": "failed",
        "source": "/models/GLM-5.2-FP8",
        "output": "./glm-5.2-int4",
        "model": {"family": "glm_moe_dsa", "model_type": "glm_moe_dsa", "num_layers": num_layers},
        "run": {"dtype": "bfloat16", "device": "cpu"},
        "tokens": {
            "file": "book.txt",
            "num_sequences": 16,
            "length": 2048,
            "num_predictions": 32752,
            "sha256": "ab" * 32,
        },
        "perplexity": {"source": 4.5678, "output": 4.6789, "ratio": 1.02432, "ratio_standard_error": 0.00123},
        "kl_divergence": {
            "mean": 0.0321,
            "standard_error": 0.00045,
            "median": 0.0111,
            "p90": 0.0555,
            "p99": 0.222,
            "p99_9": 0.777,
            "max": 3.21,
        },
        "top1_agreement": 0.9512,
        "top1_agreement_standard_error": 0.0021,
        "top_probability_shift": {"rms": 0.0432, "mean": -0.00123},
        "kl_histogram": {"below": 12, "edges": edges, "counts": [40 * index + 30 for index in range(20)]},
        "layers": layers,
        "errors": [
            {
                "role": role,
                "num_weights": 1234,
                "relative_error": error,
                "median_relative_error": error,
                "worst_relative_error": error * 1.1,
                "worst_weight": f"model.layers.3.{role}.weight",
            }
            for role, error in ROLES.items()
        ],
        "sizes": [
            {"role": "routed_expert", "source_bytes": 700 << 30, "output_bytes": 390 << 30},
            {"role": "attention", "source_bytes": 13 << 30, "output_bytes": 26 << 30},
            {"role": "norm", "source_bytes": 1 << 20, "output_bytes": 1 << 20},
        ],
        "criteria": {"max_kl": 0.03, "min_top1": None},
        "failures": ["mean KL divergence 0.0321 is above 0.03"],
        "warnings": ["12 weights are not in the output"],
    }


def small():
    """Of one layer without experts, whose outputs are the same."""
    document = made_up(1)
    document["layers"] = [{"layer": 0, "hidden_error": 0.0, "expert_error": None, "weight_errors": {}}]
    document |= {"errors": [], "failures": [], "warnings": [], "status": "ok"}
    document["criteria"] = {"max_kl": None, "min_top1": None}
    document["kl_histogram"] = {"below": 32752, "edges": [], "counts": []}
    document["top1_agreement_standard_error"] = document["kl_divergence"]["standard_error"] = None
    document["perplexity"]["ratio_standard_error"] = None
    return document


def hostile():
    """Every text that comes from elsewhere."""
    document = copy.deepcopy(made_up(4))
    for place, key in ((document, "source"), (document, "output"), (document["tokens"], "file")):
        place[key] = HOSTILE
    document["model"]["model_type"] = document["run"]["device"] = HOSTILE
    document["failures"] = document["warnings"] = [HOSTILE]
    for one in (*document["errors"], *document["sizes"]):
        one["role"] = one["role"] + HOSTILE
    for one in document["layers"]:
        one["weight_errors"] = {role + HOSTILE: error for role, error in one["weight_errors"].items()}
    return document


DOCUMENTS = {"large": made_up, "one layer": small, "hostile": hostile}


@pytest.mark.parametrize("name", ["large", "one layer"])
def test_the_made_up_documents_are_documents(name):
    schema = json.loads((Path(quantkit.cli.__file__).parent / "schemas" / "evaluate.json").read_text())
    jsonschema.validate(DOCUMENTS[name](), schema)


def test_every_figure_is_there():
    text = Reader(evaluate_page(made_up())).text
    for words in (
        *("glm-5.2-int4 against GLM-5.2-FP8", "/models/GLM-5.2-FP8", "book.txt", "16 sequences of 2,048", "bfloat16"),
        *("4.5678", "4.6789", "1.02432", "0.00123", "0.0321", "0.00045", "0.0111", "0.0555", "0.222", "0.777", "3.21"),
        *("95.12%", "0.21%", "4.32%", "-0.123%", "12 more lie below", "mean KL divergence 0.0321 is above 0.03"),
        *("routed expert", "0.08100", "1,234", "The same in both: norm", "12 weights are not in the output"),
        *(bytes_text(390 << 30), bytes_text(26 << 30), "quantkit 1.2.3, evaluate, status failed"),
    ):
        assert words in text, words
    for layer in made_up()["layers"]:
        assert f"{layer['hidden_error']:.5f}" in text
        assert layer["expert_error"] is None or f"{layer['expert_error']:.5f}" in text


def test_charts_are_told_to_those_who_do_not_see_them():
    read = Reader(evaluate_page(made_up()))
    charts = [attributes["aria-label"] for attributes in read.all("svg") if attributes.get("role") == "img"]
    assert [one.partition(":")[0] for one in charts] == [
        *("KL divergence", "Activations", "Weights", "Relative error by part", "Stored bytes by part"),
    ]
    assert "hidden states 0.00200 to 0.07900" in charts[1]
    assert "routed expert 0.08100; attention 0.00160" in charts[3]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_nothing_is_loaded_and_nothing_runs(name):
    page = evaluate_page(DOCUMENTS[name]())
    assert page == evaluate_page(DOCUMENTS[name]())
    read = Reader(page)
    assert not {"script", "img", "link", "iframe"} & {tag for tag, _ in read.tags}
    attributes = {key for _, found in read.tags for key in found}
    assert not {"src", "href", "srcset", "style"} & attributes
    assert not [key for key in attributes if key.startswith("on")]
    assert "url(" not in page
    assert "@import" not in page


def palettes():
    css = (files("quantkit.cli") / "evaluate_page.css").read_text() + (files("quantkit.cli") / "page.css").read_text()
    light, dark, *more = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    both = [light + more[0], dark + more[1]]
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", root)) for root in both]


@pytest.mark.parametrize("palette", palettes(), ids=["light", "dark"])
def test_words_and_lines_are_told_from_their_ground(palette):
    for word, ground in (("text", "surface"), ("muted", "surface"), ("ok-ink", "ok"), ("failed-ink", "failed")):
        assert contrast(palette[word], palette[ground]) >= 4.5
    for number in range(8):  # what is no word needs less
        assert contrast(palette[f"c{number}"], palette["surface"]) >= 3


# ------------------------------------------------------------------------------------------------ in a real browser

PROBE = """
const box = (one) => { const r = one.getBoundingClientRect(); return {left: r.left, top: r.top, width: r.width,
  height: r.height} }
const all = (root, css) => [...root.querySelectorAll(css)]
const shown = (css) => (root) => all(root, css).map((one) => ({text: one.textContent, ...box(one)})).filter(
  (one) => one.width)
tell({
  width: innerWidth, scroll: document.documentElement.scrollWidth, text: document.body.innerText,
  scripts: all(document, "script, img").length, background: getComputedStyle(document.body).backgroundColor,
  verdict: all(document, ".verdict").map((one) => getComputedStyle(one).backgroundColor),
  figures: all(document, "figure").map((figure) => ({
    title: figure.querySelector("h3").textContent, chart: box(figure.querySelector(".chart svg")),
    parts: all(figure, ".chart .part").map(box), words: shown(".chart text")(figure),
    ticks: shown(".tick text")(figure),
    lines: all(figure, ".chart polyline").map((one) => ({
      points: one.getAttribute("points"), colour: getComputedStyle(one).stroke, ...box(one)})),
    marks: all(figure, ".chart circle").map((one) => ({tip: one.textContent, ...box(one)})),
    grid: shown(".grid text")(figure),
  })),
})
"""


@pytest.fixture(scope="module")
def sights(tmp_path_factory):
    """What a browser shows of every document, narrow and wide."""
    asked = [(name, width) for name in DOCUMENTS for width in (360, 1280)]
    pages = [(evaluate_page(DOCUMENTS[name]()), width) for name, width in asked]
    return dict(zip(asked, look(pages, PROBE, tmp_path_factory.mktemp("light")), strict=True))


def figure(seen, title):
    (found,) = [one for one in seen["figures"] if one["title"] == title]
    return found


def test_no_page_is_wider_than_the_window_and_no_word_outside_its_chart(sights):
    for key, seen in sights.items():
        assert seen["width"] == seen["scroll"] == key[1], key
        for one in seen["figures"]:
            left, right = one["chart"]["left"] - 1, one["chart"]["left"] + one["chart"]["width"] + 1
            outside = [word for word in one["words"] if word["left"] < left or word["left"] + word["width"] > right]
            assert outside == [] or key[0] == "hostile", key
            ticks = one["ticks"]
            assert all(a["left"] + a["width"] + 2 < b["left"] for a, b in pairwise(ticks)), (key, ticks)


@pytest.mark.parametrize("width", [360, 1280])
def test_marks_stand_where_their_errors_are(sights, width):
    """Heights are read off the labels of the grid, as a reader does."""
    chart = figure(sights["large", width], "Activations")
    document = made_up()
    grid = {float(one["text"]): one["top"] for one in chart["grid"]}
    (low, low_y), *_, (high, high_y) = sorted(grid.items())
    expected = [(one["layer"], one["hidden_error"]) for one in document["layers"]]
    expected += [(one["layer"], one["expert_error"]) for one in document["layers"] if one["expert_error"] is not None]
    assert len(chart["marks"]) == len(expected)
    pixels = (low_y - high_y) / (high - low)
    centers = [(one["left"] + one["width"] / 2, one["top"] + one["height"] / 2) for one in chart["marks"]]
    zero_y = centers[0][1] + expected[0][1] * pixels
    first, last = centers[0][0], centers[77][0]
    for (layer, error), (x, y) in zip(expected, centers, strict=True):
        assert x == pytest.approx(first + (last - first) * layer / 77, abs=0.6)
        assert y == pytest.approx(zero_y - error * pixels, abs=0.6)
    assert last - first > 0.8 * chart["chart"]["width"]


def test_weights_have_a_logarithmic_axis_and_zero_no_place_on_it(sights):
    chart = figure(sights["large", 1280], "Weights")
    grid = [float(one["text"]) for one in chart["grid"]]
    assert [math.log10(b / a) for a, b in pairwise(grid)] == pytest.approx([1.0] * (len(grid) - 1))
    assert len(chart["lines"]) == 2  # what is the same in both has none
    assert len(chart["marks"]) == 78 + 75
    steps = {round(b["top"] - a["top"], 1) for a, b in pairwise(chart["grid"])}
    attention = next(one for one in chart["marks"] if "attention" in one["tip"])
    decade = chart["grid"][0]["top"] - chart["grid"][1]["top"]
    expert = next(one for one in chart["marks"] if "routed" in one["tip"])
    assert len(steps) == 1
    assert attention["top"] - expert["top"] == pytest.approx(decade * math.log10(0.081 / 0.0016), abs=0.6)


def test_lines_differ_in_colour(sights):
    for title in ("Activations", "Weights"):
        lines = figure(sights["large", 1280], title)["lines"]
        assert len({one["colour"] for one in lines}) == len(lines) == 2


@pytest.mark.parametrize("width", [360, 1280])
def test_bars_are_as_long_as_their_figures(sights, width):
    seen = sights["large", width]
    document = made_up()
    histogram = figure(seen, "KL divergence")
    counts = document["kl_histogram"]["counts"]
    heights = [one["height"] for one in histogram["parts"]]
    assert heights == pytest.approx([heights[-1] * number / counts[-1] for number in counts], abs=0.1)
    assert sum(one["width"] for one in histogram["parts"]) == pytest.approx(0.88 * histogram["chart"]["width"], abs=0.5)
    sizes = figure(seen, "Stored bytes by part")
    expected = [one[side] for one in document["sizes"] for side in ("source_bytes", "output_bytes")]
    widths = [one["width"] for one in sizes["parts"]]
    assert widths == pytest.approx([sizes["chart"]["width"] * one / (700 << 30) for one in expected], abs=0.2)
    weights = figure(seen, "Relative error by part")
    assert [one["width"] for one in weights["parts"]] == pytest.approx(
        [weights["chart"]["width"] * error / 0.081 for error in (0.081, 0.0016)], abs=0.2
    )


def test_a_model_of_one_layer_and_no_divergence_has_a_page(sights):
    for width in (360, 1280):
        seen = sights["one layer", width]
        assert [one["title"] for one in seen["figures"]] == ["KL divergence", "Activations", "Stored bytes by part"]
        assert "32,752 more lie below" in seen["text"]
        assert seen["verdict"] == []


def test_a_hostile_document_is_text(sights):
    for width in (360, 1280):
        assert sights["hostile", width]["scripts"] == 1  # the probe
        assert HOSTILE in sights["hostile", width]["text"]


def test_dark_where_the_reader_asks_for_it(sights, tmp_path):
    (dark,) = look([(evaluate_page(made_up()), 1280)], PROBE, tmp_path, dark=True)
    light = sights["large", 1280]
    levels = [sum(map(int, re.findall(r"\d+", seen["background"])[:3])) / 3 for seen in (light, dark)]
    assert levels[0] > 230
    assert levels[1] < 30
    assert dark["text"] == light["text"]
    assert dark["verdict"] != light["verdict"]


def test_the_policy_lets_no_script_run(tmp_path):
    page = tmp_path / "page.html"
    script = "<script>document.body.textContent = 'it ran'</script></body>"
    page.write_text(evaluate_page(made_up()).replace("</body>", script), encoding="utf-8")
    assert "it ran" not in re.sub(r"<script>.*?</script>", "", dump_dom(page, 1280), flags=re.DOTALL)


def pixels(png):
    """Width, and rows of (red, green, blue), of a PNG of 8 bits a channel without interlacing."""
    content, place, packed, header = png.read_bytes(), 8, b"", b""
    while place < len(content):
        (length,) = struct.unpack(">I", content[place : place + 4])
        kind, data = content[place + 4 : place + 8], content[place + 8 : place + 8 + length]
        header, packed = (data, packed) if kind == b"IHDR" else (header, packed + data if kind == b"IDAT" else packed)
        place += length + 12
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    assert (depth, interlaced) == (8, 0)
    step = {2: 3, 6: 4}[colour]
    raw, rows, before = zlib.decompress(packed), [], bytearray(width * step)
    for index in range(height):
        start = index * (width * step + 1)
        rows.append(_unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + width * step]), before, step))
        before = rows[-1]
    return width, [[tuple(row[x * step : x * step + 3]) for x in range(width)] for row in rows]


def _unfiltered(kind, row, before, step):
    for place in range(len(row)):
        left = row[place - step] if place >= step else 0
        above, corner = before[place], before[place - step] if place >= step else 0
        if kind == 4:
            guess = left + above - corner
            nearest = min((abs(guess - one), order, one) for order, one in enumerate((left, above, corner)))[2]
        else:
            nearest = (0, left, above, (left + above) // 2)[kind]
        row[place] = (row[place] + nearest) & 255
    return row


def test_a_picture_shows_the_bars_in_their_colours(tmp_path):
    """Looked at as an image: at the place of each bar there is its colour, and above it the section's ground."""
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(evaluate_page(made_up()), encoding="utf-8")
    (seen,) = look([(evaluate_page(made_up()), 520)], PROBE, tmp_path)
    parts = figure(seen, "KL divergence")["parts"]
    screenshot(page, 520, picture, height=math.ceil(parts[0]["top"] + 40))
    width, rows = pixels(picture)
    assert width == 520
    blue, surface = (31, 85, 151), (255, 255, 255)
    for part in parts[1:]:
        x, y = round(part["left"] + part["width"] / 2), round(part["top"] + part["height"] / 2)
        assert rows[y][x] == blue
    assert rows[round(parts[-1]["top"] - 6)][round(parts[2]["left"])] == surface


def test_what_a_bar_reaches_stays_readable():
    """Bars begin beside the numbers of the axis, and these are drawn over them."""
    page = evaluate_page(made_up())
    chart = page[page.index('aria-label="KL divergence') :].partition("</svg>")[0]
    first = float(re.search(r'<rect class="part" x="([\d.]+)%"', chart)[1])
    assert first > 0
    number = re.search(r'<text x="0" [^>]*>[\d,]+</text>', chart)
    assert number.start() > chart.rindex("<rect")


def test_a_tile_has_the_places_of_the_table():
    document = made_up()
    document["perplexity"] |= {"ratio": 1.00005, "ratio_standard_error": 0.00003}
    page = evaluate_page(document)
    assert page.count("1.00005") == 2
    assert page.count("0.00003") == 2
