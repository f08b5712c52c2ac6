"""Page tags as the assembler makes them for sm_90: what is read of every page, and what only of a violation."""

import importlib
import re

import pytest

from quantkit_kernels import kv_tags
from tests.kernels.sm90 import compile_kernel

TAGS = dict.fromkeys(("seals_ptr", "records_ptr"), "*i64")
STATES, RING = {"states_ptr": "*i32"}, dict.fromkeys(("lines_ptr", "count_ptr"), "*i64") | {"step": "i64"}
EXPECTATIONS = dict.fromkeys(("expected_ptr", "details_ptr", "openings_ptr"), "*i64")
CAPTURED = dict.fromkeys(("captured_seals_ptr", "captured_openings_ptr"), "*i64")
CAPTURED |= {"captured_pages_ptr": "*i32", "captured_stride": "i32"}
SIZES = dict.fromkeys(("num_pages", "num_rows", "row_pages", "num_lines", "num_entries", "null_page"), "i32")
TABLE = dict.fromkeys(("table_rows", "table_stride", "table_width", "most_pages"), "i32")
ENTRIES = dict.fromkeys(("pages_ptr", "indices_ptr", "owners_ptr", "slots_ptr", "positions_ptr"), "*i64")
BATCH = {"rows_ptr": "*i64", "lengths_ptr": "*i32", "firsts_ptr": "*i32", "table_ptr": "*i32"}
ALL = TAGS | STATES | RING | EXPECTATIONS | CAPTURED | SIZES | TABLE | ENTRIES | BATCH | {"first_generation": "i64"}
# constants; loads of each page, of each violation beside, and stores of each page (one of them a row's alone)
CHECKS = {
    "check_pages_kernel": ({"PAGE_SIZE": 64, "BY_TOKEN": True, "HAS_FIRSTS": True, "IS_CAPTURED": True}, 7, 6, 3),
    "check_captured_kernel": ({}, 4, 6, 0),
    "check_writes_kernel": ({"PAGE_SIZE": 64}, 6, 6, 0),
}


def compiled_kernel(name, constants, cache):
    module = importlib.import_module(f"quantkit_kernels.{name.split(':')[0]}")
    names = getattr(module, name.split(":")[1]).arg_names
    return compile_kernel(
        f"quantkit_kernels.{name}",
        {one: kind for one, kind in ALL.items() if one in names},
        constants | {"BLOCK": kv_tags.BLOCK},
        cache,
        num_warps=kv_tags.OPTIONS["num_warps"],
    )


def opcodes(instructions):
    return [re.sub(r"^@!?U?P\w+ ", "", text).split()[0] for text in instructions]


def number(codes, kind):
    return sum(code.startswith(kind) for code in codes)


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_reads_what_decides_and_no_more(name, tmp_path):
    """A program that finds nothing ends before the one atomic, and before the loads that only a line needs."""
    constants, page_loads, line_loads, page_stores = CHECKS[name]
    compiled = compiled_kernel(f"kv_tags_jit:{name}", constants, tmp_path)
    codes = opcodes(text for _, text in compiled.sass)
    until_found = codes[: codes.index("EXIT")]
    assert compiled.stack_bytes == 0
    assert compiled.num_registers <= (48 if name == "check_writes_kernel" else 40)
    assert number(until_found, "LDG") == page_loads
    assert number(until_found, "STG") == page_stores
    assert number(until_found, "ATOM") + number(until_found, "RED.") == 0
    assert number(codes, "LDG") == page_loads + line_loads
    assert number(codes, "ATOM") + number(codes, "RED.") == 1
    assert len(until_found) <= 210


@pytest.mark.parametrize(("name", "loads"), [("grant_kernel", 8), ("release_kernel", 5)])
def test_a_page_is_exchanged_once_and_sealed_before_and_behind_it(name, loads, tmp_path):
    """And the one atomic beside counts violations; of a grant's the row's opening is read."""
    compiled = compiled_kernel(f"kv_tag_grants_jit:{name}", {}, tmp_path)
    codes = opcodes(text for _, text in compiled.sass)
    exchange = next(at for at, code in enumerate(codes) if code.startswith("ATOMG.E.EXCH"))
    assert compiled.stack_bytes == 0
    assert compiled.num_registers <= 48
    assert number(codes[:exchange], "LDG") == loads
    assert number(codes, "LDG") == loads + (name == "grant_kernel")
    assert number(codes[:exchange], "STG") == 4
    assert number(codes[exchange : codes.index("EXIT")], "STG") == 4 + (3 if name == "grant_kernel" else 0)
    assert number(codes, "ATOM") + number(codes, "RED.") == 2
