"""The HTML page of a memory plan: what it says, that it loads nothing, and how a real browser lays it out."""

import copy
import re
import struct
from importlib.resources import files
from itertools import combinations, pairwise

import pytest

from quantkit.cli.memory_page import memory_page
from tests.browser import Reader, dump_dom, look, screenshot

HOSTILE = """<script>alert(1)</script>'"><img src=x onerror=alert(1)>&amp;"""
MINUS, DASH = "\N{MINUS SIGN}", "\N{EN DASH}"
KINDS = ("copies", "kv-used", "kv-spare", "overhead", "context", "free")


def a_rank(number=0, stage=0, layers=(0, 78), more_experts=0.0):
    """Every figure differs from every other one, so that a test sees which stands where."""
    parts = {"experts": 47.46 + more_experts, "attention": 5.05, "embedding_and_head": 0.44, "norms": 0.0004}
    spans = [(name, "weights", gib) for name, gib in parts.items()]
    spans += [("copies", "copies", 0.27), ("KV, asked for", "kv_used", 6.6), ("KV, spare", "kv_spare", 59.91)]
    spans += [("overhead", "overhead", 9.13), ("context", "context", 2.4)]
    free = 139.8 - sum(gib for _, _, gib in spans)
    return {
        "rank": number,
        "stage": stage,
        "layers": list(layers),
        "weights_gib": sum(parts.values()),
        "weights_by_part_gib": parts,
        "replicated_gib": 2.3104,
        "replicated_by_part_gib": {"attention": 2.31, "norms": 0.0004},
        "copies_gib": 0.271,
        "kv_bytes_per_token": 53940,
        "kv_pool_gib": 66.51,
        "kv_pool_band_gib": [65.71, 66.82],
        "kv_tokens": 1_323_970,
        "kv_tokens_band": [1_308_035, 1_330_122],
        "requests_at_context": 10,
        "overhead_gib": 9.133,
        "overhead_band_gib": [3.02, 15.24],
        "overhead_source": "a table of 2,048 requests",
        "load_peak_gib": 56.19,
        "free_gib": free,
        "segments": [{"name": name, "kind": kind, "gib": gib} for name, kind, gib in [*spans, ("free", "free", free)]],
    }


def a_plan(**changes):
    return {
        "command": "memory-plan",
        "version": "0.1.0",
        "status": "ok",
        "model": "glm-5.2",
        "family": "glm_moe_dsa",
        "weights_from": "config shipped with quantkit",
        "scheme": "INT4 experts in groups of 32, rest BF16",
        "with_mtp": False,
        "engine": "sglang",
        "engine_version": "0.5.23",
        "gpu": {"name": "h200", "title": "H200 141GB", "total_gib": 139.8, "free_before_load_gib": 137.4},
        "parallel": {"tp": 8, "ep": 2, "pp": 1, "dp_attention": 4, "dcp": 1, "gpus": 8},
        "budget": {
            "fraction": 0.886,
            "fraction_option": "--mem-fraction-static",
            "is_default_fraction": True,
            "rule": "pool = free after load - free before load x (1 - fraction)",
            "limit_gib": 121.74,
        },
        "kv": {"dtype": "fp8", "layout": "packed", "chosen_by": "sglang on sm90", "formula": "78 layers x 656 B"},
        "demand": {"context": 131072, "concurrency": 3, "tokens": 393216},
        "ranks": [a_rank(number) for number in range(8)],
        "verdict": "fits",
        "reasons": ["the pool holds what is asked for"],
        "advice": ["--gpu h100 would do"],
        "assumptions": ["nothing else runs on the GPU"],
        **changes,
    }


def an_overcommitted_plan():
    """On a GPU of 50 GiB: the experts end below its memory, attention begins there and ends beyond."""
    rank = a_rank()
    rank |= {"kv_pool_gib": -12.34, "kv_pool_band_gib": [-13.1, -12.02], "kv_tokens": 0, "kv_tokens_band": [0, 0]}
    rank["segments"] = [segment for segment in rank["segments"] if segment["kind"] not in ("kv_spare", "free")]
    gpu = {"name": "small", "title": "Small 54GB", "total_gib": 50.0, "free_before_load_gib": 48.0}
    ranks = [{**rank, "rank": number, "limit_gib": 42.53} for number in range(8)]
    return a_plan(gpu=gpu, ranks=ranks, verdict="does not fit")


def a_staged_plan():
    stages = [(stage, (20 * stage, min(78, 20 * stage + 20))) for stage in range(4)]
    ranks = [a_rank(16 * stage + one, stage, layers, stage / 2) for stage, layers in stages for one in range(16)]
    return a_plan(ranks=ranks, verdict="tight")


def a_comparison():
    first, second = a_plan(scheme="FP8", verdict="tight"), a_plan()
    for rank in first["ranks"]:
        rank["copies_gib"] = 1.5
    difference = {"weights_gib": -33.81, "kv_pool_gib": 33.82, "kv_tokens": 673_000, "requests_at_context": -1}
    return {
        **{key: first[key] for key in ("command", "version", "status")},
        "plans": [first, second],
        "difference": difference,
    }


def hostile(tree):
    """Every text of a document, keys that are names among them, replaced; the figures stay."""
    if isinstance(tree, dict):
        names = {"experts": "experts" + HOSTILE}
        return {names.get(key, key): hostile(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [hostile(value) for value in tree]
    return HOSTILE if isinstance(tree, str) else tree


def gib(value):
    return f"{value:,.2f} GiB".replace("-", MINUS)


def expected_texts(plan):
    """Every figure of a plan as a reader should find it."""
    gpu, demand = plan["gpu"], plan["demand"]
    yield from (plan[key] for key in ("model", "family", "weights_from", "scheme", "engine_version", "verdict"))
    yield from (*plan["reasons"], *plan["advice"], *plan["assumptions"])
    yield from (f"{plan['parallel']['gpus']} x {gpu['title']}", "TP 8, EP 2, PP 1, DP attention 4, DCP 1")
    yield from (f"{gpu['total_gib']:g} GiB", f"{gpu['free_before_load_gib']:g} GiB free before load")
    yield from (f"--mem-fraction-static {plan['budget']['fraction']} (the default)", plan["budget"]["rule"])
    yield f"{plan['kv']['dtype']}, {plan['kv']['layout']}; chosen by {plan['kv']['chosen_by']}"
    yield f"context {demand['context']:,} tokens, concurrency {demand['concurrency']}: {demand['tokens']:,} tokens"
    for rank in plan["ranks"]:
        yield f"static limit {rank.get('limit_gib', plan['budget']['limit_gib'])} GiB"
        keys = ("weights_gib", "replicated_gib", "copies_gib", "kv_pool_gib", "overhead_gib", "load_peak_gib")
        yield from (gib(rank[key]) for key in (*keys, "free_gib"))
        yield gib(rank["weights_gib"] - rank["replicated_gib"])
        for part, size in rank["weights_by_part_gib"].items():
            same = rank["replicated_by_part_gib"].get(part)
            yield f" {gib(size - (same or 0))} {DASH if same is None else gib(same)} "
        for segment in rank["segments"]:
            yield f"{segment['name'].replace('_', ' ')} {gib(segment['gib'])}"
        low, high = rank["kv_tokens_band"]
        yield f"{rank['kv_tokens']:,} tokens band {low:,} tokens to {high:,} tokens"
        low, high = rank["kv_pool_band_gib"]
        yield f"{gib(rank['kv_pool_gib'])} band {gib(low)} to {gib(high)}"
        low, high = rank["overhead_band_gib"]
        yield f"{gib(rank['overhead_gib'])} band {gib(low)} to {gib(high)} {rank['overhead_source']}"
        yield f"{rank['requests_at_context']} requests"
        yield f"{rank['kv_bytes_per_token']:,} B {plan['kv']['formula']}"
        yield f"stage {rank['stage']}, layers {rank['layers'][0]} to {rank['layers'][1] - 1}"


@pytest.mark.parametrize("make", [a_plan, an_overcommitted_plan, a_staged_plan])
def test_every_figure_is_there_with_its_unit(make):
    plan = make()
    text = Reader(memory_page(plan)).text
    assert [one for one in expected_texts(plan) if one not in text] == []
    assert "GiB means 230 bytes" in text  # 2^30: the 30 is raised
    assert "quantkit 0.1.0, memory-plan, status ok" in text


def test_a_comparison_shows_both_plans_and_the_difference():
    document = a_comparison()
    text = Reader(memory_page(document)).text
    assert [one for plan in document["plans"] for one in expected_texts(plan) if one not in text] == []
    assert "glm-5.2: 2 plans compared" in text
    assert "Plan A: FP8" in text
    assert "Plan B: INT4 experts" in text
    assert f"All weights {gib(52.9504)} {gib(52.9504)} {MINUS}33.81 GiB" in text  # as the document says
    for change in ("+33.82 GiB", "+673,000 tokens", f"{MINUS}1 requests"):
        assert change in text
    assert f"Copies of weights 1.50 GiB 0.27 GiB {MINUS}1.23 GiB" in text  # reckoned: it has none


def test_equal_ranks_share_a_bar():
    page = memory_page(a_staged_plan())
    assert re.findall(r"<h3>(ranks? [^<]*)</h3>", page) == ["ranks 0-15", "ranks 16-31", "ranks 32-47", "ranks 48-63"]
    plan = a_plan()
    plan["ranks"][3]["overhead_gib"] = 9.5
    page = memory_page(plan)
    assert re.findall(r"<h3>(ranks? [^<]*)</h3>", page) == ["ranks 0-2, 4-7", "rank 3"]


def test_the_page_is_of_the_document_alone():
    document = a_comparison()
    before = copy.deepcopy(document)
    assert memory_page(document) == memory_page(before)
    assert document == before


@pytest.mark.parametrize("make", [a_plan, an_overcommitted_plan, a_staged_plan, a_comparison])
def test_nothing_is_loaded(make):
    page = memory_page(make())
    words = ("http:", "https:", "//", "@import", "url(", "<script", "<link", "<img", "javascript:", " src=", " href=")
    assert [word for word in words if word in page] == []
    assert not [name for _, attributes in Reader(page).tags for name in attributes if name.startswith("on")]
    assert "default-src 'none'" in page


@pytest.mark.parametrize("make", [a_plan, an_overcommitted_plan, a_comparison])
def test_every_text_is_escaped(make):
    read, plain = Reader(memory_page(hostile(make()))), Reader(memory_page(make()))
    assert [tag for tag, _ in read.tags if tag in ("li", "script", "img")] == ["li"] * len(plain.all("li"))
    assert {tag for tag, _ in read.tags} == {tag for tag, _ in plain.tags}
    assert {name for _, attributes in read.tags for name in attributes} == {
        name for _, attributes in plain.tags for name in attributes
    }
    assert "<script>alert(1)</script>" in read.text


def test_structure_for_readers_of_every_kind():
    read = Reader(memory_page(a_comparison()))
    assert read.all("html") == [{"lang": "en"}]
    levels = [int(tag[1]) for tag, _ in read.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert len(read.all("table")) == len(read.all("caption")) == 5
    assert {attributes.get("scope") for attributes in read.all("th")} == {"row", "col"}
    charts = [attributes for attributes in read.all("svg") if attributes.get("role") == "img"]
    assert len(charts) == 2
    for chart in charts:
        assert chart["aria-label"].startswith("Memory of ranks 0-7: experts 47.46 GiB, attention 5.05 GiB, ")
        assert chart["aria-label"].endswith("free 8.54 GiB, GPU memory 139.8 GiB, static limit 121.74 GiB")
    hidden = [attributes for attributes in read.all("svg") if "aria-hidden" in attributes]
    assert len(hidden) + len(charts) == len(read.all("svg"))
    assert read.all("title")[1:] == [{}] * 2 * 10  # a tooltip for each segment


def palettes():
    """Colours by name: light, dark."""
    css = files("quantkit.cli").joinpath("memory_page.css").read_text()
    roots = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", root)) for root in roots[:2]]


def linear(colour):
    shares = [byte / 255 for byte in bytes.fromhex(colour[1:])]
    return [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]


def contrast(one, other):
    low, high = sorted(0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in map(linear, (one, other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", palettes(), ids=["light", "dark"])
def test_words_have_the_contrast_of_wcag_aa(palette):
    inks = {(name, f"{name}-ink") for name in palette if f"{name}-ink" in palette}
    inks |= {(ground, ink) for ground in ("page", "surface") for ink in ("text", "muted", "excess")}
    assert len(inks) == 23
    low = {pair: contrast(palette[pair[0]], palette[pair[1]]) for pair in inks}
    assert {pair: ratio for pair, ratio in low.items() if ratio < 4.5} == {}


# what people without one kind of cone see, in linear RGB (Machado, Oliveira, Fernandes 2009)
SIGHTS = {
    "trichromat": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanope": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranope": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanope": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}
XYZ = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1094, 0.8729))  # of white: 1, 1, 1


def lab(colour, sight):
    seen = [min(max(sum(a * b for a, b in zip(row, linear(colour), strict=True)), 0), 1) for row in sight]
    x, y, z = (sum(a * b for a, b in zip(row, seen, strict=True)) for row in XYZ)
    x, y, z = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("palette", palettes(), ids=["light", "dark"])
def test_kinds_look_different_to_everyone(palette, sight):
    for one, other in combinations(("s0", "s1", "s2", *KINDS), 2):
        seen = [lab(palette[name], SIGHTS[sight]) for name in (one, other)]
        assert sum((a - b) ** 2 for a, b in zip(*seen, strict=True)) ** 0.5 > 10, (one, other)


# ------------------------------------------------------------------------------------------------ in a real browser

PROBE = """
const box = (element) => { const r = element.getBoundingClientRect(); return {left: r.left, width: r.width} }
const seen = {
  width: innerWidth, scroll: document.documentElement.scrollWidth, text: document.body.innerText,
  scripts: document.querySelectorAll("script, img").length,
  background: getComputedStyle(document.body).backgroundColor,
  figures: [...document.querySelectorAll("figure")].map((figure) => ({
    label: figure.querySelector("h3").textContent, chart: box(figure.querySelector(".chart")),
    parts: [...figure.querySelectorAll(".chart .part")].map((part) => ({
      name: part.parentNode.querySelector("title").textContent.split(":")[0], ...box(part)})),
    names: [...figure.querySelectorAll(".name")].filter((name) => getComputedStyle(name).display != "none").map(
      (name) => ({name: name.querySelector("text").textContent, ...box(name)})),
    marks: Object.fromEntries(["total", "limit"].map((css) => [css, box(figure.querySelector(`.${css} line`))])),
    words: [...figure.querySelectorAll(".mark text, .tick text")].map(box).filter((word) => word.width),
    ticks: [...figure.querySelectorAll(".tick text")].map(box).filter((word) => word.width),
    beyond: [...figure.querySelectorAll(".beyond rect")].map(box),
  })),
}
tell(seen)
"""


MAKERS = (a_plan, an_overcommitted_plan, a_staged_plan, a_comparison, lambda: hostile(an_overcommitted_plan()))


@pytest.fixture(scope="module")
def sights(tmp_path_factory):
    """By page and width: the document, and what a browser shows."""
    asked = [(make(), width) for make in MAKERS for width in (360, 1280)]
    seen = look([(memory_page(document), width) for document, width in asked], PROBE, tmp_path_factory.mktemp("light"))
    return [(document, width, one) for (document, width), one in zip(asked, seen, strict=True)]


def test_no_page_is_wider_than_the_window(sights):
    for _, width, seen in sights:
        assert seen["width"] == seen["scroll"] == width
        for figure in seen["figures"]:
            left, right = figure["chart"]["left"] - 1, figure["chart"]["left"] + figure["chart"]["width"] + 1
            outside = [word for word in figure["words"] if word["left"] < left or word["left"] + word["width"] > right]
            assert outside == []
            assert len(figure["ticks"]) >= 3
            assert all(one["left"] + one["width"] + 4 < other["left"] for one, other in pairwise(figure["ticks"]))


def test_segments_are_as_wide_as_their_gib(sights):
    num_bars = []
    for document, _, seen in sights:
        plans = document.get("plans", [document])
        bars = [(plan, rank) for plan in plans for rank in {str(r["segments"]): r for r in plan["ranks"]}.values()]
        ends = [plan["gpu"]["total_gib"] for plan in plans]
        end = max([*ends, *(sum(one["gib"] for one in rank["segments"]) for _, rank in bars)])
        num_bars.append(len(bars))
        for (plan, rank), figure in zip(bars, seen["figures"], strict=True):
            left, pixels = figure["chart"]["left"], figure["chart"]["width"] / end
            start = 0.0
            for segment, part in zip(rank["segments"], figure["parts"], strict=True):
                assert part["left"] == pytest.approx(left + start * pixels, abs=0.1)
                assert part["width"] == pytest.approx(segment["gib"] * pixels, abs=0.1)
                start += segment["gib"]
            limit = rank.get("limit_gib", plan["budget"]["limit_gib"])
            for mark, gibs in (("total", plan["gpu"]["total_gib"]), ("limit", limit)):
                assert figure["marks"][mark]["left"] == pytest.approx(left + gibs * pixels, abs=1.1)
    assert num_bars == [1, 1, 1, 1, 4, 4, 2, 2, 1, 1]


def test_what_lies_beyond_the_gpu_is_hatched(sights):
    for document, _, seen in sights[2:4]:
        (figure,) = seen["figures"]
        (beyond,) = figure["beyond"]
        total = figure["marks"]["total"]
        needed = sum(segment["gib"] for segment in document["ranks"][0]["segments"])
        assert beyond["left"] == pytest.approx(total["left"], abs=1.1)
        assert beyond["width"] == pytest.approx(figure["chart"]["width"] * (needed - 50) / needed, abs=1)
        assert f"{needed:.2f} GiB needed: {needed - 50:.2f} GiB more than the GPU has" in seen["text"]
        assert "does not fit" in seen["text"]
    assert not [figure for _, _, seen in sights[:2] + sights[4:8] for figure in seen["figures"] if figure["beyond"]]


def test_names_stand_in_segments_that_have_room(sights):
    for document, width, seen in sights[:8]:
        for figure in seen["figures"]:
            parts = {part["name"]: part for part in figure["parts"]}
            for name in figure["names"]:
                part = parts[name["name"]]
                assert part["left"] <= name["left"] + 0.5, (document["command"], width, name)
                assert name["left"] + name["width"] <= part["left"] + part["width"] + 0.5
    narrow, wide = ({name["name"] for name in sights[index][2]["figures"][0]["names"]} for index in (0, 1))
    assert {"experts", "KV, spare"} <= narrow
    assert narrow | {"overhead"} <= wide


def test_a_hostile_model_is_text(sights):
    for _, _, seen in sights[8:]:
        assert seen["scripts"] == 1  # the probe
        assert HOSTILE in seen["text"]


def test_dark_where_the_reader_asks_for_it(sights, tmp_path):
    (dark,) = look([(memory_page(a_plan()), 1280)], PROBE, tmp_path, dark=True)
    light = sights[1][2]
    levels = [sum(map(int, re.findall(r"\d+", seen["background"])[:3])) / 3 for seen in (light, dark)]
    assert levels[0] > 230
    assert levels[1] < 30
    assert dark["text"] == light["text"]


def test_the_policy_lets_no_script_run_and_a_picture_comes_out(tmp_path):
    page = tmp_path / "page.html"
    script = "<script>document.body.textContent = 'it ran'</script></body>"
    page.write_text(memory_page(a_plan()).replace("</body>", script), encoding="utf-8")
    assert "it ran" not in re.sub(r"<script>.*?</script>", "", dump_dom(page, 1280), flags=re.DOTALL)
    screenshot(page, 1280, tmp_path / "page.png")
    header = (tmp_path / "page.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", header[16:24]) == (1280, 1600)
