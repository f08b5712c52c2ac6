"""KV bytes of a token, to the byte."""

import pytest

from quantkit.engines.parallel import Parallel
from quantkit.errors import UsageError
from quantkit.memory.kv_format import KvDtype, KvLayout
from tests.memory.plans import plan

BF16, FP8, RAW, PACKED = KvDtype.BF16, KvDtype.FP8, KvLayout.RAW, KvLayout.PACKED


def cells(name, **request):
    return [stage.cell for stage in plan(name, **request).stages]


@pytest.mark.parametrize(
    ("name", "dtype", "layout", "num_bytes"),
    [
        ("glm-5.2", FP8, PACKED, 53_940),  # 78 x 656 + 21 x 132
        ("glm-5.3", FP8, PACKED, 53_940),
        ("glm-5.2", FP8, RAW, 47_700),
        ("glm-5.2", BF16, None, 92_628),
        ("glm-5", FP8, PACKED, 61_464),
        ("glm-5.1", FP8, PACKED, 61_464),
        ("glm-5", FP8, RAW, 55_224),
        ("glm-5", BF16, None, 100_152),
        ("deepseek-v3.2", FP8, PACKED, 48_068),
        ("deepseek-v3.2", BF16, None, 78_324),
        ("kimi-k2", BF16, None, 70_272),
        ("kimi-k2", FP8, None, 35_136),
        ("kimi-k2.6", FP8, None, 35_136),
        ("deepseek-v3", BF16, None, 70_272),
        ("glm-4.7-flash", BF16, None, 54_144),
        ("glm-4.5", BF16, None, 47_104),
        ("glm-4.5", FP8, None, 23_552),
        ("qwen3-235b-a22b", BF16, None, 48_128),
    ],
)
def test_bytes_of_a_token(name, dtype, layout, num_bytes):
    tp = 4 if name == "glm-4.7-flash" else 8
    (cell,) = cells(name, kv_dtype=dtype, kv_layout=layout, parallel=Parallel(tp=tp))
    assert cell.num_bytes == num_bytes
    assert cell.formula.endswith(f"= {num_bytes:,} B")


def test_the_formula_is_written_out():
    (cell,) = cells("glm-5.2", kv_dtype=FP8, with_mtp=True)
    assert cell.formula == "78 layers x 656 B + 21 index layers x 132 B + 1 MTP layer x 788 B = 54,728 B"
    (cell,) = cells("glm-4.5", kv_dtype=BF16)
    assert cell.formula == "92 layers x 1 KV heads x 2 x 128 x 2 B = 47,104 B"


@pytest.mark.parametrize("tp", [1, 2, 4, 16])
def test_tensor_parallelism_does_not_divide_the_latent(tp):
    (cell,) = cells("glm-5.2", kv_dtype=FP8, parallel=Parallel(tp=tp))
    assert cell.num_bytes == 53_940


@pytest.mark.parametrize(("tp", "num_bytes"), [(1, 376_832), (2, 188_416), (4, 94_208), (8, 47_104), (16, 47_104)])
def test_heads_are_divided_down_to_one(tp, num_bytes):
    (cell,) = cells("glm-4.5", kv_dtype=BF16, parallel=Parallel(tp=tp))
    assert cell.num_bytes == num_bytes


def test_attention_replicas_keep_whole_heads():
    (cell,) = cells("glm-4.5", kv_dtype=BF16, parallel=Parallel(tp=8, dp_attention=8))
    assert cell.num_bytes == 376_832


def test_context_parallelism_divides_the_latent_and_in_vllm_the_index_too():
    parallel = Parallel(tp=8, dcp=8)
    (cell,) = cells("glm-5.2", engine="vllm", kv_dtype=FP8, parallel=parallel)
    assert cell.num_bytes == (78 * 656 + 21 * 132) / 8
    # SGLang's backends for it read raw rows
    (cell,) = cells("glm-5.2", engine="sglang", kv_dtype=FP8, parallel=parallel)
    assert cell.num_bytes == 78 * 576 / 8 + 21 * 132
    assert "78 layers x 576 B / DCP 8 + 21 index layers x 132 B" in cell.formula


def test_the_draft_layer_is_divided_in_vllm_only():
    parallel = Parallel(tp=8, dcp=8)
    draft = {
        engine: cells("glm-5.2", engine=engine, kv_dtype=FP8, parallel=parallel, with_mtp=True)[0].num_bytes
        - cells("glm-5.2", engine=engine, kv_dtype=FP8, parallel=parallel)[0].num_bytes
        for engine in ("sglang", "vllm")
    }
    assert draft == {"sglang": 576 + 132, "vllm": (656 + 132) / 8}


def test_pipeline_stages_have_their_own_layers():
    found = cells("glm-5.2", kv_dtype=FP8, parallel=Parallel(tp=8, pp=2), with_mtp=True)
    # layers 0 to 38 have 12 of the 21 indexers; the MTP layer is in the last stage
    assert [cell.num_bytes for cell in found] == [39 * 656 + 12 * 132, 39 * 656 + 9 * 132 + 788]


@pytest.mark.parametrize(
    ("engine", "gpu", "dtype", "layout"),
    [
        ("sglang", "h200", BF16, RAW),
        ("sglang", "b200", FP8, RAW),
        ("sglang", "rtx-pro-6000", FP8, PACKED),
        ("sglang", "mi355x", BF16, RAW),
        ("vllm", "h200", BF16, RAW),
        ("vllm", "b300", FP8, RAW),
        ("vllm", "rtx-pro-6000", FP8, PACKED),
    ],
)
def test_what_the_engine_chooses_for_sparse_attention(engine, gpu, dtype, layout):
    chosen = plan("glm-5.2", engine=engine, gpu=gpu, context=4096).kv_format
    assert (chosen.dtype, chosen.layout) == (dtype, layout)
    assert chosen.chosen_by.startswith(engine)


@pytest.mark.parametrize(
    ("engine", "gpu", "layout"),
    [("sglang", "h200", PACKED), ("sglang", "b200", RAW), ("sglang", "mi355x", RAW), ("vllm", "h200", PACKED)],
)
def test_what_fp8_means_for_sparse_attention(engine, gpu, layout):
    assert plan("glm-5.2", engine=engine, gpu=gpu, kv_dtype=FP8, context=4096).kv_format.layout is layout


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("gpu", ["h200", "b200", "mi355x"])
def test_dense_latent_attention_stays_bf16_everywhere(engine, gpu):
    assert plan("kimi-k2", engine=engine, gpu=gpu, context=4096).kv_format.dtype is BF16


def test_a_layout_alone_means_fp8():
    assert plan("glm-5.2", kv_layout=RAW).kv_format.dtype is FP8


@pytest.mark.parametrize(
    ("name", "request_", "words"),
    [
        ("kimi-k2", {"kv_layout": PACKED}, "sparse attention"),
        ("glm-5.2", {"kv_layout": PACKED, "kv_dtype": BF16}, "FP8 layout"),
        ("glm-5.2", {"engine": "vllm", "gpu": "a100"}, "no sparse-attention backend for sm80"),
        ("glm-5.2", {"engine": "vllm", "gpu": "rtx-pro-6000", "kv_dtype": BF16}, "FP8 KV only"),
        ("kimi-k2", {"engine": "vllm", "gpu": "a100", "kv_dtype": FP8}, "BF16 KV only"),
        ("glm-5.2", {"parallel": Parallel(tp=8, dcp=8), "role": "decode"}, "no DCP in pools"),
    ],
)
def test_layouts_that_do_not_exist_are_refused(name, request_, words):
    with pytest.raises(UsageError, match=words):
        plan(name, **request_)
