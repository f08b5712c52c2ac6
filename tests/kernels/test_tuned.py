"""Tiles come from a table where the GPU and the shape are in one, and are computed otherwise."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import triton

from quantkit_kernels import tuned
from quantkit_kernels.gemm import int4_gemm
from quantkit_kernels.reference import int4_gemm as twin
from quantkit_kernels.tiles import GemmTile, MoeTile, gemm_tile, moe_tile
from tests.kernels.compare import assert_close
from tests.kernels.test_repack import random_int4

pytestmark = pytest.mark.gpu
SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
GPU = "Some GPU, 100 GB"
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
        "dense": {"96x256": {"32": asdict(LARGE), "4": asdict(SMALL)}},
        "moe": {"4x64x256": {"8": asdict(EXPERTS)}},
    }
    tuned.table_of.cache_clear()


def write(table):
    tuned.file_of(GPU).write_text(json.dumps(table))


def test_the_tile_of_the_next_number_of_tokens_is_taken(table):
    write(table)
    shape = {"num_rows": 96, "num_cols": 256, "gpu": GPU}
    assert [gemm_tile(num_tokens=number, **shape) for number in (1, 4, 5, 32)] == [SMALL, SMALL, LARGE, LARGE]
    assert moe_tile(num_tokens=3, top_k=2, experts=(4, 64, 256), gpu=GPU) == EXPERTS


def test_what_is_in_no_table_is_computed(table):
    write(table)
    computed = gemm_tile(num_tokens=3, num_rows=96, num_cols=256)
    assert computed != SMALL
    assert gemm_tile(num_tokens=3, num_rows=96, num_cols=256, gpu="Another GPU") == computed
    for shape in (
        {"num_tokens": 33, "num_rows": 96, "num_cols": 256},
        {"num_tokens": 3, "num_rows": 97, "num_cols": 256},
    ):
        assert gemm_tile(**shape, gpu=GPU) == gemm_tile(**shape)


def test_a_product_uses_it(table, device, monkeypatch):

    from quantkit_kernels import gemm as module

    write(table)
    used = []
    run = module.run_gemm
    monkeypatch.setattr(module, "gpu_name", lambda _: GPU)
    monkeypatch.setattr(
        module, "run_gemm", lambda *args, tile, **rest: used.append(tile) or run(*args, tile=tile, **rest)
    )
    weight = random_int4((96, 256), 32, device)
    x = torch.randn((3, 256), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(device)
    got = int4_gemm(x, *weight, group_size=32)
    assert used == [SMALL]
    assert_close("product", twin(x.double(), *weight, group_size=32), got, most=2.0**-8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpu": "Another GPU"}, "is no table of tiles for Some GPU"),
        ({"extra": {}}, "is no table of tiles"),
        ({"dense": {"96x256": {"4": {"block_n": 64}}}}, "a tile of dense has the fields"),
    ],
)
def test_a_table_that_is_none_is_named(change, words, table):
    write(table | change)
    with pytest.raises(ValueError, match=words):
        gemm_tile(num_tokens=3, num_rows=96, num_cols=256, gpu=GPU)


def test_tables_of_the_package_are_tables():
    for path in (Path(tuned.__file__).parent / "tuned").glob("*.json"):
        gpu = json.loads(path.read_text())["gpu"]
        assert tuned.file_of(gpu).name == path.name
        for kind, make in (("dense", GemmTile), ("moe", MoeTile)):
            for shape, tiles in tuned.table_of(gpu)[kind].items():
                for number in tiles:
                    sizes = tuple(map(int, shape.split("x")))
                    assert tuned.tuned_tile(kind, sizes, num_tokens=number, gpu=gpu, make=make) is not None


def test_the_tuner_writes_what_is_read(table, device, monkeypatch):
    """With times that are made up: the last tile of the grid is the fastest."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import tune_kernels
    from bench_cases import Sizes

    countdown = iter(range(10**6, 0, -1))

    def time_of(call):
        number = next(countdown)
        if number % 29 == 0:  # some of the tiles are really run
            call(number)
        return float(number)

    monkeypatch.setattr(tune_kernels.torch.cuda, "get_device_name", lambda *_: GPU)
    document = tune_kernels.tune([1, 5], Sizes.small(), device, time_of) | {"gpu": GPU}
    write(document)
    last = list(tune_kernels.gemm_tiles(gemm_tile(num_tokens=5, num_rows=64, num_cols=256)))[-1]
    assert gemm_tile(num_tokens=5, num_rows=64, num_cols=256, gpu=GPU) == last
    assert moe_tile(num_tokens=5, top_k=4, experts=(4, 64, 128), gpu=GPU).num_stages == 4
