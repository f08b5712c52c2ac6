"""Tiles come from a table where the GPU and the shape are in one, and are computed otherwise."""

import json
import math
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import triton

from quantkit_kernels import tuned
from quantkit_kernels.gemm import int4_gemm
from quantkit_kernels.reference import int4_gemm as twin
from quantkit_kernels.tiles import DenseShape, GemmTile, MoeShape, MoeTile, gemm_tile, moe_tile
from quantkit_kernels.tuned import NO_GPU, Gpu
from quantkit_kernels.word_order import repack
from tests.kernels.compare import assert_close
from tests.kernels.int4_weights import random_int4

pytestmark = pytest.mark.gpu
SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
GPU = "Some GPU, 100 GB"
ITS = Gpu(GPU, NO_GPU.num_sms)
DENSE, MOE = DenseShape(96, 256, 32), MoeShape(4, 64, 256, 32, 2)
SMALL = GemmTile(block_n=64, block_m=8, split_k=2, num_stages=3)
LARGE = GemmTile(block_n=128, block_m=32, split_k=1)
EXPERTS = MoeTile(gate_up_n=64, down_n=64, block_m=16, split_k=1, is_sorted=True)


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "TUNED", tmp_path)
    tuned.table_of.cache_clear()
    yield {
        "gpu": GPU,
        "triton": triton.__version__,
        "dense": {"96x256x32": {"32": asdict(LARGE), "4": asdict(SMALL)}},
        "moe": {"4x64x256x32x2": {"8": asdict(EXPERTS)}},
    }
    tuned.table_of.cache_clear()


def write(table):
    tuned.file_of(GPU).write_text(json.dumps(table))


def test_the_tile_of_the_next_number_of_tokens_is_taken(table):
    write(table)
    tiles = [gemm_tile(DENSE, num_tokens=number, gpu=ITS) for number in (1, 4, 5, 32)]
    assert tiles == [SMALL, SMALL, LARGE, LARGE]
    assert moe_tile(MOE, num_tokens=3, gpu=ITS) == EXPERTS


def test_what_is_in_no_table_is_computed(table):
    write(table)
    computed = gemm_tile(DENSE, num_tokens=3)
    assert computed != SMALL
    assert gemm_tile(DENSE, num_tokens=3, gpu=ITS._replace(name="Another GPU")) == computed
    assert gemm_tile(DENSE, num_tokens=3, gpu=ITS, is_repacked=False) == computed
    for change, num_tokens in (({}, 33), ({"num_rows": 97}, 3), ({"group_size": 64}, 3)):
        shape = DENSE._replace(**change)
        assert gemm_tile(shape, num_tokens=num_tokens, gpu=ITS) == gemm_tile(shape, num_tokens=num_tokens)
    for change, rest in (
        ({"group_size": 64}, {}),
        ({"top_k": 3}, {}),
        ({}, {"is_repacked": False}),
        ({}, {"num_global": 8}),
    ):
        shape = MOE._replace(**change)
        assert moe_tile(shape, num_tokens=3, gpu=ITS, **rest) == moe_tile(shape, num_tokens=3, **rest) != EXPERTS


def test_a_product_uses_it(table, device, monkeypatch):

    from quantkit_kernels import gemm as module

    write(table)
    used = []
    run = module.run_gemm
    monkeypatch.setattr(module, "gpu_of", lambda _: ITS)
    monkeypatch.setattr(
        module, "run_gemm", lambda *args, tile, **rest: used.append(tile) or run(*args, tile=tile, **rest)
    )
    weight = random_int4((96, 256), 32, device)
    x = torch.randn((3, 256), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(device)
    got = int4_gemm(x, *repack(*weight, group_size=32), group_size=32)
    assert used == [SMALL]
    assert_close("product", twin(x.double(), *weight, group_size=32), got, most=2.0**-8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpu": "Another GPU"}, "is no table of tiles for Some GPU"),
        ({"extra": {}}, "is no table of tiles"),
        ({"dense": {"96x256x32": {"4": {"block_n": 64}}}}, "a tile of dense has the fields"),
    ],
)
def test_a_table_that_is_none_is_named(change, words, table):
    write(table | change)
    with pytest.raises(ValueError, match=words):
        gemm_tile(DENSE, num_tokens=3, gpu=ITS)


def check_tables():
    for path in tuned.TUNED.glob("*.json"):
        gpu = json.loads(path.read_text())["gpu"]
        assert tuned.file_of(gpu).name == path.name
        for kind, make, of in (("dense", GemmTile, DenseShape), ("moe", MoeTile, MoeShape)):
            for shape, tiles in tuned.table_of(gpu)[kind].items():
                for number in tiles:
                    sizes = of(*map(int, shape.split("x")))
                    assert tuned.tuned_tile(kind, sizes, num_tokens=number, gpu=gpu, make=make) is not None


def test_tables_of_the_package_are_tables():
    """There may be none yet: the next test shows that a broken one would be found."""
    check_tables()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({}, None),
        ({"dense": {"96x256": {"4": asdict(SMALL)}}}, TypeError),  # of before groups were in the name
        ({"moe": {"4x64x256x32x2": {"8": asdict(SMALL)}}}, ValueError),
    ],
)
def test_a_broken_table_is_found(change, error, table):
    write(table | change)
    with pytest.raises(error) if error else nullcontext():
        check_tables()


@pytest.fixture
def tune_kernels(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import tune_kernels

    return tune_kernels


def works(tune_kernels, document, device, tokens=(1, 5)):
    sizes = tune_kernels.Sizes.small()
    return list(tune_kernels.works_of(document, tune_kernels.shapes_of(sizes), list(tokens), sizes, device))


def tiles_by_time(cost):
    """Times that are made up, of the tiles themselves: a work's calls are its tiles here."""
    return lambda calls: [cost(call) for call in calls]


def with_tiles_as_calls(works):
    return [(shape, replace(work, call_of=lambda tile: tile)) for shape, work in works]


def never():
    return False


def test_the_tuner_writes_what_is_read(table, tune_kernels, device):
    document = table | {"dense": {}, "moe": {}}
    made = with_tiles_as_calls(works(tune_kernels, document, device))
    lines = list(tune_kernels.tune(document, made, tiles_by_time(lambda tile: 1 / tile.num_stages), never))
    assert len(lines) == 4
    assert lines[0].startswith("dense 64x256x32, M 1: 0.2 us, computed 0.2; ")
    tune_kernels.write(document, tuned.file_of(GPU))
    assert [path.name for path in tuned.TUNED.iterdir()] == [tuned.file_of(GPU).name]
    computed = gemm_tile(DenseShape(64, 256, 32), num_tokens=5)
    assert gemm_tile(DenseShape(64, 256, 32), num_tokens=5, gpu=ITS) == replace(computed, num_stages=5)
    assert moe_tile(MoeShape(4, 64, 128, 32, 4), num_tokens=5, gpu=ITS).num_stages == 5
    assert tune_kernels.document_of(tuned.file_of(GPU), GPU) == document
    assert tune_kernels.document_of(tuned.file_of(GPU), "Another GPU")["dense"] == {}
    tune_kernels.write(document | {"triton": "2.0.0"}, tuned.file_of(GPU))
    assert tune_kernels.document_of(tuned.file_of(GPU), GPU)["dense"] == {}


def test_every_tile_that_is_timed_runs(table, tune_kernels, device):
    """The first and the last tile of each line, since the interpreter takes its time."""
    document = table | {"dense": {}, "moe": {}}

    def times(calls):
        for call in (calls[0], calls[-1]):
            call(0)
        return [float(number) for number, _ in enumerate(calls, start=1)]

    assert len(list(tune_kernels.tune(document, works(tune_kernels, document, device, [5]), times, never))) == 2


def test_what_is_missing_is_tuned_first_and_a_tile_is_where_the_next_search_begins(table, tune_kernels, device):
    shape = "64x256x32"
    best = asdict(replace(gemm_tile(DenseShape(64, 256, 32), num_tokens=1), split_k=8))
    document = table | {"dense": {shape: {"1": best}}, "moe": {}}
    made = works(tune_kernels, document, device, [9, 1])
    assert [(shape.kind, work.num_tokens) for shape, work in made] == [
        ("dense", 9),
        ("moe", 1),
        ("moe", 9),
        ("dense", 1),
    ]
    timed = []
    list(
        tune_kernels.tune(
            document,
            with_tiles_as_calls(made[-1:]),
            lambda calls: timed.append(calls) or [2 / tile.split_k for tile in calls],
            never,
        )
    )
    assert timed[0] == [made[-1][1].computed, GemmTile(**best)]
    assert timed[1] == [replace(GemmTile(**best), split_k=number) for number in (2, 4, 16)]
    assert document["dense"][shape]["1"] == best | {"split_k": 16}


def test_what_was_found_for_fewer_tokens_is_where_the_next_search_begins(tune_kernels):
    from tune_kernels import Shape, Work
    from tune_search import moe_knobs

    unsorted = replace(EXPERTS, is_sorted=False, block_m=16)
    timed = []
    made = [
        (Shape("moe", MOE), Work(number, computed, moe_knobs(computed, number), lambda tile: tile))
        for number, computed in ((4, unsorted), (64, EXPERTS))
    ]
    list(
        tune_kernels.tune(
            {"moe": {}},
            made,
            lambda calls: timed.append(calls) or [(2 if tile.is_sorted else 1) / tile.num_stages for tile in calls],
            never,
        )
    )
    begin = timed.index([EXPERTS, replace(EXPERTS, num_stages=5)])
    assert not timed[begin - 1][-1].is_sorted
    # sorting is no knob of so many tokens
    assert all(tile.is_sorted for calls in timed[begin:] for tile in calls)


def test_when_the_time_is_over_what_was_found_stays(table, tune_kernels, device):
    document = table | {"dense": {}, "moe": {}}
    calls_before_the_end = iter([False, False, False, True, True, True])
    made = with_tiles_as_calls(works(tune_kernels, document, device))
    lines = list(
        tune_kernels.tune(
            document, made, tiles_by_time(lambda tile: 1 / tile.split_k), lambda: next(calls_before_the_end)
        )
    )
    # asked before the first work and before each of its lines: the first of these is that of split_k
    assert len(lines) == 1
    assert document["dense"]["64x256x32"]["1"]["split_k"] == 16
    assert list(document["dense"]["64x256x32"]) == ["1"]
    assert document["moe"] == {}


def test_the_search_turns_one_knob_at_a_time(tune_kernels):
    from tune_search import descend, gemm_knobs

    start = GemmTile(block_n=128, block_m=32, split_k=1)
    lines = []

    def times(tiles):
        lines.append(tiles)
        return [abs(tile.block_n * tile.split_k - 512) + tile.block_m + tile.num_stages for tile in tiles]

    found = descend([start], gemm_knobs(start), times, never)
    assert found.tile == GemmTile(block_n=128, block_m=16, split_k=4, num_stages=2)
    assert (found.microseconds, found.computed) == (18.0, 420.0)
    assert [len(line) for line in lines] == [1, 4, 2, 1, 3, 4, 2, 1]
    timed = [tile for line in lines for tile in line]
    assert found.num_timed == len(timed) == len(set(timed))
    for line in lines:
        differing = [name for name in asdict(start) if len({getattr(tile, name) for tile in line}) > 1]
        assert len(differing) <= 1
    again = []
    assert descend([start], gemm_knobs(start), lambda tiles: again.append(tiles) or times(tiles), never) == found


@pytest.mark.parametrize(("gain", "kept"), [(0.995, True), (0.97, False)])
def test_noise_is_no_reason_for_another_tile(gain, kept, tune_kernels):
    from tune_search import descend, moe_knobs

    found = descend(
        [EXPERTS],
        moe_knobs(EXPERTS, 64),
        lambda tiles: [100.0 * (1.0 if tile.num_stages == 4 else gain) for tile in tiles],
        never,
    )
    assert (found.tile == EXPERTS) == kept
    assert found.tile.is_sorted


def test_a_tile_that_does_not_fit_is_passed_over(tune_kernels, device):
    from concurrent.futures import ThreadPoolExecutor

    from tune_search import descend, gemm_knobs

    def call(fits):
        def run(number):
            if not fits:
                raise triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory")

        return run

    with ThreadPoolExecutor(2) as executor, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune_kernels, "graph_microseconds", lambda run: run(0) or 7.0)
        assert list(tune_kernels.gpu_times([call(True), call(False), call(True)], executor)) == [7.0, math.inf, 7.0]
    start = GemmTile(block_n=128, block_m=16, split_k=1, num_stages=5)
    found = descend(
        [start], gemm_knobs(start), lambda tiles: [math.inf if tile.num_stages > 3 else 1.0 for tile in tiles], never
    )
    assert found.tile.num_stages == 2
    with pytest.raises(AssertionError, match="no tile fits"):
        descend([start], gemm_knobs(start), lambda tiles: [math.inf] * len(tiles), never)


def test_an_unknown_shape_is_named():
    command = [sys.executable, str(SCRIPTS / "tune_kernels.py"), "--only", "moe,3x4"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "--only takes of 16384x8192x32, 256x256x6144x32x8, " in ran.stderr
    assert "not 3x4" in ran.stderr
