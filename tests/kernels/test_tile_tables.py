"""A table of tiles that a kernel could not run with is refused with its path and place."""

import json
from dataclasses import asdict

import pytest
import triton

from quantkit_kernels import tuned
from quantkit_kernels.tiles import DenseShape, GemmTile, MoeShape, MoeTile, gemm_tile, moe_tile
from quantkit_kernels.tuned import NO_GPU, Gpu

GPU = Gpu("Some GPU", NO_GPU.num_sms)
DENSE = asdict(GemmTile(block_n=64, block_m=8, split_k=2))
MOE = asdict(MoeTile(gate_up_n=64, down_n=64, block_m=16, split_k=1, is_sorted=True))


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "TUNED", tmp_path)
    tuned.table_of.cache_clear()
    yield tuned.file_of(GPU.name).write_text
    tuned.table_of.cache_clear()


def table(**change):
    return json.dumps({"gpu": GPU.name, "triton": triton.__version__, "dense": {}, "moe": {}} | change)


def dense(**change):
    return table(dense={"96x256x32": {"4": DENSE | change}})


def moe(**change):
    return table(moe={"4x64x256x32x2": {"8": MOE | change}})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "json: is no JSON"),
        ("[]", "json: is no table of tiles for Some GPU"),
        (table(dense=[]), "json: dense: is a list, not an object"),
        (table(dense={"96x256x32": 4}), "json: dense 96x256x32: is a int, not an object"),
        (table(dense={"96x256x32": {"four": DENSE}}), "json: dense 96x256x32: 'four' is no number of tokens"),
        (table(dense={"96x256x32": {"4": [64]}}), "json: dense 96x256x32 4: is a list, not an object"),
        (dense(extra=1), "json: dense 96x256x32 4: a tile of dense has the fields"),
        (dense(split_k=0), "json: dense 96x256x32 4: split_k is 0, not from 1 to 256"),
        (dense(split_k=-1), "split_k is -1, not from 1"),
        (dense(split_k=2.0), r"split_k is 2\.0, not from 1"),
        (dense(split_k="2"), "split_k is '2', not from 1"),
        (dense(block_m=-8), r"block_m is -8, not one of \(8, 16, 32, 64\)"),
        (dense(block_n=96), r"block_n is 96, not one of \(64, 128, 256\)"),
        (dense(num_warps=8), "block_n is 64: 8 warps have no 16 rows each"),
        (dense(num_warps=1), "num_warps is 1, not one of"),
        (dense(num_stages=0), "num_stages is 0, not from 1 to 6"),
        (dense(num_stages=True), "num_stages is True"),
        (moe(down_n=0), "json: moe 4x64x256x32x2 8: down_n is 0, not one of"),
        (moe(is_sorted=1), "json: moe 4x64x256x32x2 8: is_sorted is neither true nor false"),
    ],
)
def test_what_is_no_table_is_named(text, words, write):
    write(text)
    with pytest.raises(ValueError, match=words):
        gemm_tile(DenseShape(96, 256, 32), num_tokens=3, gpu=GPU)
        moe_tile(MoeShape(4, 64, 256, 32, 2), num_tokens=3, gpu=GPU)


def test_a_version_that_is_no_text_is_another_triton(write):
    write(table(triton=3, dense={"96x256x32": {"4": {}}}))
    shape = DenseShape(96, 256, 32)
    assert gemm_tile(shape, num_tokens=3, gpu=GPU) == gemm_tile(shape, num_tokens=3)
