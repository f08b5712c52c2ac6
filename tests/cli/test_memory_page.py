"""The HTML page of a memory plan: what it says, that it loads nothing, and how a real browser lays it out."""

import copy
import json
import re
import struct
from functools import cache, partial
from importlib.resources import files
from itertools import chain, combinations, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from quantkit.cli.memory_documents import check_document, comparison_document, plan_document
from quantkit.cli.memory_options import MemoryOptions
from quantkit.cli.memory_page import memory_page
from quantkit.cli.memory_request import plan_checked
from quantkit.engines.parallel import Parallel
from quantkit.memory.gpus import gpu_named
from quantkit.memory.kv_format import KvDtype
from quantkit.memory.make import make_memory_plan
from quantkit.memory.serving import MemoryRequest
from tests.browser import Reader, dump_dom, look, screenshot
from tests.memory.plans import FP8, INT4, model
from tests.memory.plans import plan as make_plan

HOSTILE = """<script>alert(1)</script>'"><img src=x onerror=alert(1)>&amp;"""
MINUS, DASH = "\N{MINUS SIGN}", "\N{EN DASH}"
KINDS = ("copies", "kv-used", "kv-spare", "overhead", "context", "free")


LOG = """\
[2026-10-02 09:00:01] server_args={'model_path': 'zai-org/GLM-5.2-FP8', 'context_length': 131072, \
'mem_fraction_static': 0.8765, 'tp_size': 8, 'kv_cache_dtype': 'fp8_e4m3'}
[2026-10-02 09:00:20 TP0] Load weight begin. avail mem=137.40 GB
[2026-10-02 09:02:20 TP0] Load weight end. elapsed=120.11 s, avail mem=48.50 GB, mem usage=88.90 GB.
[2026-10-02 09:02:42 TP0] KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 620032, KV size: 31.15 GB
[2026-10-02 09:03:01 TP0] Capture decode CUDA graph end. elapsed=11.41 s, mem usage=1.66 GB, avail mem=14.24 GB.
"""
REPLICAS = Parallel(tp=8, ep=2, dp_attention=4)


@cache
def planned(name):
    """Documents as the command makes them, by the name of what they show."""
    made = partial(make_plan, "glm-5.2", kv_dtype=KvDtype.FP8, context=131_072)
    if name == "plan":
        return plan_document(made(scheme=INT4, parallel=REPLICAS, concurrency=10))
    if name == "staged":
        return plan_document(made(scheme=INT4, parallel=Parallel(tp=16, pp=4), concurrency=3))
    if name == "comparison":
        return comparison_document(*(made(scheme=scheme, parallel=REPLICAS, concurrency=10) for scheme in (FP8, INT4)))
    if name == "overcommitted":  # the experts end below the memory of the GPU, attention begins there and ends beyond
        request = MemoryRequest(gpu=gpu_named("h200", total_gib=48.5), scheme=INT4, context=131_072, concurrency=3)
        return plan_document(make_memory_plan(model("glm-5.2"), request))
    with TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        log.write_text(LOG)
        return check_document(plan_checked(MemoryOptions(), model("glm-5.2"), log))


def document_of(name):
    """To alter."""
    return copy.deepcopy(planned(name))


NAMES = ("plan", "overcommitted", "staged", "comparison", "checked")


def hostile(tree):
    """Every text of a document, keys that are names among them, replaced; the figures stay."""
    if isinstance(tree, dict):
        names = {"experts": "experts" + HOSTILE}
        return {names.get(key, key): hostile(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [hostile(value) for value in tree]
    return HOSTILE if isinstance(tree, str) else tree


def shown(value, unit="GiB"):
    if unit != "GiB":
        return f"{value:,} {unit.removesuffix('s') if value == 1 else unit}".replace("-", MINUS)
    return f"{value:,.2f} GiB".replace("-", MINUS)


def plans_of(document):
    return document.get("plans", [document])


def expected_texts(plan):
    """Every figure of a plan as a reader should find it."""
    gpu, demand, parallel = plan["gpu"], plan["demand"], plan["parallel"]
    yield from (plan[key] for key in ("model", "family", "weights_from", "scheme", "engine_version", "verdict"))
    yield from (*plan["reasons"], *plan["advice"], *plan["assumptions"])
    yield f"{parallel['gpus']} x {gpu['title']}"
    sizes = ("TP", "tp"), ("EP", "ep"), ("PP", "pp"), ("DP attention", "dp_attention"), ("DCP", "dcp")
    yield ", ".join(f"{name} {parallel[key]}" for name, key in sizes)
    yield f"Flags {parallel['flags']} "
    yield "Role prefill and decode "
    yield from (f"{gpu['total_gib']:g} GiB", f"{round(gpu['free_before_load_gib'], 2):g} GiB free before load")
    whose = {"default": "the default", "option": "as given", "log": "as logged"}[plan["budget"]["fraction_from"]]
    yield f"--mem-fraction-static {plan['budget']['fraction']} ({whose}): {plan['budget']['rule']}"
    yield f"static limit {round(plan['budget']['limit_gib'], 2):g} GiB"
    yield f"{plan['kv']['dtype']}, {plan['kv']['layout']}; chosen by {plan['kv']['chosen_by']}"
    yield f"context {demand['context']:,} tokens, concurrency {demand['concurrency']}"
    yield f"Tokens in the pool {shown(plan['kv_tokens'], 'tokens')} "
    yield f"Requests at full context {shown(plan['requests_at_context'], 'requests')} "
    for rank in plan["ranks"]:
        yield from expected_of_a_rank(rank)


def expected_of_a_rank(rank):
    sharded = rank["weights_gib"] - rank["replicated_gib"]
    yield f" {shown(rank['weights_gib'])} "
    yield f"{shown(sharded)} {shown(rank['replicated_gib'])}"
    for part, size in rank["weights_by_part_gib"].items():
        same = rank["replicated_by_part_gib"].get(part)
        yield f" {shown(size - (same or 0))} {DASH if same is None else shown(same)} "
    for segment in rank["segments"]:
        yield f"{segment['name'].replace('_', ' ')} {shown(segment['gib'])}"
    yield f"{shown(rank['kv_bytes_per_token'], 'B')} {rank['kv_formula']} "
    yield f" {shown(rank['requests_at_context'], 'requests')} "
    for key, words in (("kv_pool", ""), ("overhead", rank["overhead_source"]), ("buffers", "")):
        low, high = rank[f"{key}_band_gib"]
        yield f" {shown(rank[f'{key}_gib'])} band {shown(low)} to {shown(high)} {words}"
    low, high = (shown(end, "tokens") for end in rank["kv_tokens_band"])
    yield f" {shown(rank['kv_tokens'], 'tokens')} band {low} to {high} "
    yield from (f" {shown(rank[key])} " for key in ("copies_gib", "load_peak_gib", "free_gib"))
    yield f"stage {rank['stage']}, layers {rank['layers'][0]} to {rank['layers'][1] - 1}"


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_is_there_with_its_unit(name):
    document = planned(name)
    text = Reader(memory_page(document)).text
    assert [one for plan in plans_of(document) for one in expected_texts(plan) if one not in text] == []
    assert "GiB means 230 bytes" in text  # 2^30: the 30 is raised
    assert f"quantkit {document['version']}, memory-plan, status {document['status']}" in text


def test_figures_stand_behind_their_names():
    (row,) = {json.dumps({**rank, "rank": None}): rank for rank in planned("plan")["ranks"]}.values()
    text = Reader(memory_page(planned("plan"))).text.partition("KV cache, overhead and the rest of one rank ranks 0-7")[
        2
    ]
    low, high = map(shown, row["buffers_band_gib"])
    rest = f"Copies of weights {shown(row['copies_gib'])} Buffers {shown(row['buffers_gib'])} band {low} to {high} "
    assert rest + f"Peak while loading {shown(row['load_peak_gib'])} Left free {shown(row['free_gib'])} " in text
    assert (
        f"Requests in the pool {shown(row['requests_at_context'], 'requests')} Overhead {row['overhead_gib']:.2f}"
        in text
    )
    assert f"KV cache of one token {row['kv_bytes_per_token']:,} B" in text
    assert f"KV pool {row['kv_pool_gib']:.2f} GiB band" in text


def test_replicas_share_what_is_asked_for():
    document = planned("plan")
    assert (document["demand"]["concurrency"], document["demand"]["per_replica"]) == (10, 3)
    assert document["requests_at_context"] == 4 * document["ranks"][0]["requests_at_context"] > 0
    text = Reader(memory_page(document)).text
    assert "concurrency 10 in all, 3 on each attention replica: 393,216 tokens asked for" in text
    assert "tokens of each attention replica; 393,216 tokens asked for" in text
    whole = shown(document["requests_at_context"], "requests")
    assert f"Requests at full context {whole} of the whole server, 131,072 tokens each" in text


def test_without_replicas_nothing_is_said_of_them():
    text = Reader(memory_page(planned("staged"))).text
    assert "concurrency 3: 393,216 tokens asked for" in text
    assert "tokens 393,216 tokens asked for" in text
    assert "replica" not in text.replace("replicated", "").replace("Replicated", "")
    assert "of the whole server" not in text


def test_words_that_depend_on_what_was_asked():
    document = document_of("plan")
    document["demand"]["tokens"] = 0
    document["role"], document["with_mtp"], document["engine_title"] = "decode", True, "vLLM"
    document["budget"]["is_default_fraction"] = False
    document["budget"]["fraction"] = 0.8
    text = Reader(memory_page(document)).text
    for words in ("nothing asked for", "Role decode", "MTP layer loaded", "vLLM 0.", "0.8 (as given)"):
        assert words in text
    assert "MTP layer left out" in Reader(memory_page(planned("plan"))).text


def test_a_comparison_shows_both_plans_and_the_difference():
    document = document_of("comparison")
    document["difference"]["overhead_gib"] = -7.25
    text = Reader(memory_page(document)).text
    assert "glm-5.2: 2 plans compared" in text
    assert "Plan A: FP8" in text
    assert "Plan B: INT4 experts" in text
    one, other = (plan["ranks"][0] for plan in document["plans"])
    change = shown(other["weights_gib"] - one["weights_gib"])
    assert change.startswith(MINUS)
    assert f"All weights {shown(one['weights_gib'])} {shown(other['weights_gib'])} {change}" in text
    more = shown(other["kv_tokens"] - one["kv_tokens"], "tokens")
    assert f" +{more} " in text
    assert f"{MINUS}7.25 GiB Copies of weights" in text  # as the document says
    peak = shown(other["load_peak_gib"] - one["load_peak_gib"])
    assert f"{shown(one['load_peak_gib'])} {shown(other['load_peak_gib'])} {peak} Left free" in text
    experts = [rank["weights_by_part_gib"]["experts"] for rank in (one, other)]
    assert f"experts {shown(experts[0])} {shown(experts[1])} {shown(experts[1] - experts[0])}" in text


def test_what_a_comparison_reckons_itself_is_of_the_rank_where_fewest_tokens_fit():
    document = document_of("comparison")
    first, second = document["plans"]
    for plan, copies_gib in ((first, 1.5), (second, 0.25)):
        plan["ranks"][3] |= {"kv_tokens": 77, "copies_gib": copies_gib}
    first["ranks"][3]["weights_by_part_gib"]["extra"] = 4.0
    text = Reader(memory_page(document)).text
    usual = [shown(plan["ranks"][0]["copies_gib"]) for plan in document["plans"]]
    assert f"Copies of weights {usual[0]} to 1.50 GiB 0.25 GiB to {usual[1]} {MINUS}1.25 GiB" in text
    assert f"extra 4.00 GiB {DASH} {MINUS}4.00 GiB" in text


def test_a_log_stands_beside_the_plan():
    document = document_of("checked")
    rows = {row["name"]: row for row in document["check"]}
    assert rows["CUDA graphs"]["planned"] is None
    text = Reader(memory_page(document)).text
    section = text.partition("Against the log")[2].partition("Weights of one rank, by part")[0]
    assert "The log names the model zai-org/GLM-5.2-FP8." in section
    assert "Planned and measured planned measured difference line of the log weights and copies" in section
    for row in rows.values():
        cells = [DASH if row["planned"] is None else logged(row["planned"], row["unit"])]
        cells.append(logged(row["measured"], row["unit"]))
        percent = row["difference_percent"]
        cells.append(DASH if percent is None else f"{percent:{'+' if percent else ''}.2f} %".replace("-", MINUS))
        assert f"{row['name']} {' '.join(cells)} {row['line']} " in section
    assert f"CUDA graphs {DASH} 1.66 GiB {DASH} 5" in section
    assert "fraction 0.8765 0.8765 0.00 % 1" in section
    assert f" {MINUS}" in section
    document["log_model"] = ""
    assert "The log names" not in Reader(memory_page(document)).text


def logged(value, unit):
    return shown(value, unit) if unit == "GiB" else f"{round(value, 2 if unit else 4):,.15g} {unit}".strip()


@pytest.mark.parametrize("name", ["plan", "comparison"])
def test_without_a_log_there_is_no_section_for_it(name):
    assert "Against the log" not in memory_page(planned(name))


def test_equal_ranks_share_a_bar():
    page = memory_page(planned("staged"))
    assert re.findall(r"<h3>(ranks? [^<]*)</h3>", page) == ["ranks 0-15", "ranks 16-31", "ranks 32-47", "ranks 48-63"]
    document = document_of("plan")
    document["ranks"][3] |= {"overhead_gib": 9.5, "kv_tokens": 5}
    page = memory_page(document)
    assert re.findall(r"<h3>(ranks? [^<]*)</h3>", page) == ["ranks 0-2, 4-7", "rank 3"]
    assert "Of rank 3, where fewest tokens fit." in page
    assert "where fewest tokens fit" not in memory_page(planned("plan"))


@pytest.mark.parametrize("name", NAMES)
def test_every_row_has_a_cell_for_each_column(name):
    for table in re.findall(r"<table>(.*?)</table>", memory_page(planned(name)), re.DOTALL):
        num_columns = table.count('scope="col"')
        assert {row.count("<td>") for row in re.findall(r"<tr[^>]*><th scope=.row.*?</tr>", table)} == {num_columns}


def test_one_is_singular():
    document = document_of("plan")
    document["requests_at_context"] = document["kv_tokens"] = 1
    text = Reader(memory_page(document)).text
    assert "Tokens in the pool 1 token of" in text
    assert "Requests at full context 1 request of" in text


def test_a_part_of_the_weights_has_its_shade_in_every_bar():
    entries = re.findall(r'<li class="weights (s\d)">.*?<span>(.*?)</span>', memory_page(planned("comparison")))
    assert len(entries) == 2 * len(dict(reversed(entry) for entry in entries)) == 2 * len(set(entries)) == 16
    assert {shade for shade, _ in entries} == {f"s{index}" for index in range(8)}


def test_a_name_stands_left_of_what_is_hatched():
    document = document_of("overcommitted")
    document["gpu"]["total_gib"] = 30.0
    needed = sum(segment["gib"] for segment in document["ranks"][0]["segments"])
    assert f'<text x="{100 * 15 / needed:.4f}%" y="66">experts</text>' in memory_page(document)


def test_the_page_is_of_the_document_alone():
    document = document_of("comparison")
    assert memory_page(document) == memory_page(planned("comparison"))
    assert document == planned("comparison")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_loaded(name):
    page = memory_page(planned(name))
    words = ("http:", "https:", "//", "@import", "url(", "<script", "<link", "<img", "javascript:", " src=", " href=")
    assert [word for word in words if word in page] == []
    assert not [name for _, attributes in Reader(page).tags for name in attributes if name.startswith("on")]
    assert "default-src 'none'" in page


@pytest.mark.parametrize("name", NAMES)
def test_every_text_is_escaped(name):
    read, plain = Reader(memory_page(hostile(planned(name)))), Reader(memory_page(planned(name)))
    assert [tag for tag, _ in read.tags if tag in ("li", "script", "img")] == ["li"] * len(plain.all("li"))
    assert {tag for tag, _ in read.tags} == {tag for tag, _ in plain.tags}
    assert {name for _, attributes in read.tags for name in attributes} == {
        name for _, attributes in plain.tags for name in attributes
    }
    assert "<script>alert(1)</script>" in read.text


def test_structure_for_readers_of_every_kind():
    document = planned("comparison")
    read = Reader(memory_page(document))
    assert read.all("html") == [{"lang": "en"}]
    levels = [int(tag[1]) for tag, _ in read.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert len(read.all("table")) == len(read.all("caption")) == 5
    assert len(Reader(memory_page(planned("checked"))).all("caption")) == 3
    assert {attributes.get("scope") for attributes in read.all("th")} == {"row", "col"}
    charts = [attributes for attributes in read.all("svg") if attributes.get("role") == "img"]
    for chart, plan in zip(charts, document["plans"], strict=True):
        sizes = [
            f"{segment['name'].replace('_', ' ')} {round(segment['gib'], 2):.15g} GiB"
            for segment in plan["ranks"][0]["segments"]
        ]
        limit = f"static limit {round(plan['budget']['limit_gib'], 2):g} GiB"
        assert chart["aria-label"] == f"Memory of ranks 0-7: {', '.join([*sizes, 'GPU memory 139.8 GiB', limit])}"
    hidden = [attributes for attributes in read.all("svg") if "aria-hidden" in attributes]
    assert len(hidden) + len(charts) == len(read.all("svg"))
    num_segments = sum(len(plan["ranks"][0]["segments"]) for plan in document["plans"])
    assert read.all("title")[1:] == [{}] * num_segments  # a tooltip for each


def palettes():
    """Colours by name: light, dark."""
    found: list[dict[str, str]] = [{}, {}]
    for name in ("memory_page.css", "page.css"):
        css = files("quantkit.cli").joinpath(name).read_text()
        for index, root in enumerate(re.findall(r":root \{(.*?)\}", css, re.DOTALL)[:2]):
            found[index] |= re.findall(r"--([\w-]+): (#[0-9a-f]{6})", root)
    return found


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


@pytest.fixture(scope="module")
def sights(tmp_path_factory):
    """By the name of a document: it, the width of the window and what a browser shows, narrow and wide."""
    documents = {name: planned(name) for name in NAMES}
    documents |= {f"hostile {name}": hostile(planned(name)) for name in ("overcommitted", "checked")}
    asked = [(name, width) for name in documents for width in (360, 1280)]
    pages = [(memory_page(documents[name]), width) for name, width in asked]
    seen = look(pages, PROBE, tmp_path_factory.mktemp("light"))
    found = {name: [] for name in documents}
    for (name, width), one in zip(asked, seen, strict=True):
        found[name].append((documents[name], width, one))
    return found


def test_no_page_is_wider_than_the_window(sights):
    for _, width, seen in chain(*sights.values()):
        assert seen["width"] == seen["scroll"] == width
        for figure in seen["figures"]:
            left, right = figure["chart"]["left"] - 1, figure["chart"]["left"] + figure["chart"]["width"] + 1
            outside = [word for word in figure["words"] if word["left"] < left or word["left"] + word["width"] > right]
            assert outside == []
            assert len(figure["ticks"]) >= 3
            assert all(one["left"] + one["width"] + 4 < other["left"] for one, other in pairwise(figure["ticks"]))


def test_segments_are_as_wide_as_their_gib(sights):
    num_bars = {}
    for name, found in sights.items():
        for document, _, seen in found:
            plans = plans_of(document)
            bars = [(plan, rank) for plan in plans for rank in {str(r["segments"]): r for r in plan["ranks"]}.values()]
            ends = [plan["gpu"]["total_gib"] for plan in plans]
            end = max([*ends, *(sum(one["gib"] for one in rank["segments"]) for _, rank in bars)])
            num_bars[name] = len(bars)
            for (plan, rank), figure in zip(bars, seen["figures"], strict=True):
                left, pixels = figure["chart"]["left"], figure["chart"]["width"] / end
                start = 0.0
                for segment, part in zip(rank["segments"], figure["parts"], strict=True):
                    assert part["left"] == pytest.approx(left + start * pixels, abs=0.1)
                    assert part["width"] == pytest.approx(segment["gib"] * pixels, abs=0.1)
                    start += segment["gib"]
                for mark, gib in (("total", plan["gpu"]["total_gib"]), ("limit", plan["budget"]["limit_gib"])):
                    assert figure["marks"][mark]["left"] == pytest.approx(left + gib * pixels, abs=1.1)
    assert num_bars == {
        "plan": 1,
        "overcommitted": 1,
        "staged": 4,
        "comparison": 2,
        "checked": 1,
        "hostile overcommitted": 1,
        "hostile checked": 1,
    }


def test_what_lies_beyond_the_gpu_is_hatched(sights):
    for document, _, seen in sights["overcommitted"]:
        (figure,) = seen["figures"]
        (beyond,) = figure["beyond"]
        mark, total = figure["marks"]["total"], document["gpu"]["total_gib"]
        segments = document["ranks"][0]["segments"]
        assert segments[0]["gib"] < total < segments[0]["gib"] + segments[1]["gib"]
        needed = sum(segment["gib"] for segment in segments)
        assert beyond["left"] == pytest.approx(mark["left"], abs=1.1)
        assert beyond["width"] == pytest.approx(figure["chart"]["width"] * (needed - total) / needed, abs=1)
        assert f"{needed:.2f} GiB needed: {needed - total:.2f} GiB more than the GPU has" in seen["text"]
        assert "does not fit" in seen["text"]
    enough = chain(*(sights[name] for name in ("plan", "staged", "checked")))
    assert not [figure for _, _, seen in enough for figure in seen["figures"] if figure["beyond"]]


def test_names_stand_in_segments_that_have_room(sights):
    for document, width, seen in chain(*(sights[name] for name in NAMES)):
        for figure in seen["figures"]:
            parts = {part["name"]: part for part in figure["parts"]}
            for name in figure["names"]:
                part = parts[name["name"]]
                assert part["left"] <= name["left"] + 0.5, (document["command"], width, name)
                assert name["left"] + name["width"] <= part["left"] + part["width"] + 0.5
    narrow, wide = ({name["name"] for name in seen["figures"][0]["names"]} for _, _, seen in sights["plan"])
    assert "experts" in narrow
    assert "KV cache, asked for" not in narrow
    assert narrow | {"KV cache, asked for", "KV cache, spare"} <= wide


def test_a_hostile_model_is_text(sights):
    for _, _, seen in chain(sights["hostile overcommitted"], sights["hostile checked"]):
        assert seen["scripts"] == 1  # the probe
        assert HOSTILE in seen["text"]


def test_dark_where_the_reader_asks_for_it(sights, tmp_path):
    (dark,) = look([(memory_page(planned("plan")), 1280)], PROBE, tmp_path, dark=True)
    light = sights["plan"][1][2]
    levels = [sum(map(int, re.findall(r"\d+", seen["background"])[:3])) / 3 for seen in (light, dark)]
    assert levels[0] > 230
    assert levels[1] < 30
    assert dark["text"] == light["text"]


def test_the_policy_lets_no_script_run_and_a_picture_comes_out(tmp_path):
    page = tmp_path / "page.html"
    script = "<script>document.body.textContent = 'it ran'</script></body>"
    page.write_text(memory_page(planned("plan")).replace("</body>", script), encoding="utf-8")
    assert "it ran" not in re.sub(r"<script>.*?</script>", "", dump_dom(page, 1280), flags=re.DOTALL)
    screenshot(page, 1280, tmp_path / "page.png")
    header = (tmp_path / "page.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", header[16:24]) == (1280, 1600)
