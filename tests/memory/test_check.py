"""A plan against the log of its server: what the log decides, what stays as given, and every figure side by side."""

from dataclasses import replace

import pytest

from quantkit.engines.parallel import Parallel
from quantkit.errors import SourceError, UsageError
from quantkit.memory.check import compare_with_log, model_of_log, plan_of_log, request_of_log
from quantkit.memory.doubts import Comparison, doubts, doubts_of_start
from quantkit.memory.engine_log import read_engine_log
from quantkit.memory.gpus import GPUS
from quantkit.memory.kv_format import KvDtype, KvLayout
from quantkit.memory.make import make_memory_plan
from quantkit.memory.serving import MemoryRequest
from tests.memory.plans import INT4, model

H200 = GPUS["h200"]
SIZES = ("tp", "ep", "pp", "dp_attention", "dcp")
# SGLang 0.5.23: GLM-5.2-FP8 over 8 ranks
SGLANG = """\
[2026-10-02 09:00:01] server_args={'model_path': 'zai-org/GLM-5.2-FP8', 'context_length': 131072, \
'mem_fraction_static': 0.87, 'max_running_requests': 48, 'tp_size': 8, 'pp_size': 1, 'dp_size': 1, 'attn_dp_size': 1, \
'dcp_size': 1, 'ep_size': 1, 'kv_cache_dtype': 'fp8_e4m3', 'moe_dense_tp_size': None}
[2026-10-02 09:00:20 TP0] Load weight begin. avail mem=137.40 GB
[2026-10-02 09:00:20 TP1] Load weight begin. avail mem=137.20 GB
[2026-10-02 09:02:20 TP0] Load weight end. elapsed=120.11 s, type=GlmMoeDsaForCausalLM, quant=fp8, \
avail mem=48.50 GB, mem usage=88.90 GB.
[2026-10-02 09:02:21 TP1] Load weight end. elapsed=121.02 s, type=GlmMoeDsaForCausalLM, quant=fp8, \
avail mem=48.30 GB, mem usage=88.90 GB.
[2026-10-02 09:02:42 TP0] KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 620032, KV size: 31.15 GB
[2026-10-02 09:02:42 TP1] KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 620032, KV size: 31.15 GB
[2026-10-02 09:03:01 TP0] Capture decode CUDA graph end. bs=[1, 2, 4], elapsed=11.41 s, mem usage=1.66 GB, \
avail mem=14.24 GB.
[2026-10-02 09:03:08 TP0] max_total_num_tokens=620032, chunked_prefill_size=8192, max_prefill_tokens=16384, \
max_running_requests=48, context_len=131072, available_gpu_mem=14.03 GB
"""
# vLLM 0.33.0: GLM-4.7 as two engines of four ranks
VLLM = """\
(APIServer pid=9) INFO 10-02 09:00:01 [startup.py:96] non-default args: {'model': 'zai-org/GLM-4.7', \
'max_model_len': 65536, 'enable_expert_parallel': True, 'gpu_memory_utilization': 0.95}
(EngineCore_DP0 pid=1) INFO 10-02 09:00:09 [core.py:139] Initializing a V1 LLM engine (v0.33.0) with config: \
model='zai-org/GLM-4.7', tensor_parallel_size=4, pipeline_parallel_size=1, data_parallel_size=2, \
decode_context_parallel_size=1, kv_cache_dtype=fp8_e4m3
(Worker_DP0_TP0_EP0 pid=3) INFO 10-02 09:01:00 [model_runner.py:428] Model loading took 86.50 GiB memory and 9.1 seconds
(EngineCore_DP1 pid=2) INFO 10-02 09:01:01 [core.py:139] Initializing a V1 LLM engine (v0.33.0) with config: \
model='zai-org/GLM-4.7', tensor_parallel_size=4, pipeline_parallel_size=1, data_parallel_size=2, \
decode_context_parallel_size=1, kv_cache_dtype=fp8_e4m3
(Worker_DP1_TP0_EP4 pid=4) INFO 10-02 09:01:09 [model_runner.py:428] Model loading took 86.25 GiB memory and 9.3 seconds
(Worker_DP0_TP0_EP0 pid=3) INFO 10-02 09:01:20 [gpu_worker.py:772] Available KV cache memory: 38.25 GiB
(EngineCore_DP0 pid=1) INFO 10-02 09:01:30 [kv_cache_utils.py:1147] GPU KV cache size: 871,904 tokens, \
Maximum concurrency for 65,536 tokens per request: 13.30x
(Worker_DP0_TP0_EP0 pid=3) INFO 10-02 09:03:20 [model_runner.py:1163] Graph capturing finished in 25 secs, took 2.50 GiB
"""


LOGGED = frozenset({*SIZES, "fraction", "context", "kv_dtype"})


@pytest.fixture
def read(tmp_path):
    """Reads the text of a log."""

    def of(text):
        (tmp_path / "server.log").write_text(text)
        return read_engine_log(tmp_path / "server.log")

    return of


@pytest.fixture
def check(read):
    """Rows by their names, of a model checked with the text of a log."""

    def of(name, text, given=frozenset(), **request):
        log = read(text)
        found = request_of_log(log, MemoryRequest(gpu=H200, **request), frozenset(given))
        plan = make_memory_plan(model(name), found, with_advice=False)
        return {row.name: row for row in compare_with_log(plan, log)}

    return of


def sizes(request):
    return {name: getattr(request.parallel, name) for name in SIZES}


def test_an_sglang_log_tells_how_the_server_was_started(read):
    found = request_of_log(read(SGLANG), MemoryRequest(gpu=H200), frozenset())
    assert found == MemoryRequest(
        gpu=H200,
        engine="sglang",
        parallel=Parallel(tp=8),
        fraction=0.87,
        logged=LOGGED | {"max_running_requests"},
        context=131_072,
        kv_dtype=KvDtype.FP8,
        max_running_requests=48,
    )
    other = SGLANG
    for key, value in {"tp": 32, "pp": 2, "ep": 8, "dcp": 4, "attn_dp": 2}.items():
        other = other.replace(f"'{key}_size': {8 if key == 'tp' else 1}", f"'{key}_size': {value}")
    found = request_of_log(read(other), MemoryRequest(gpu=H200), frozenset())
    assert sizes(found) == {"tp": 32, "ep": 8, "pp": 2, "dp_attention": 2, "dcp": 4}


@pytest.mark.parametrize(
    ("engine", "arguments", "expected"),
    [
        ("sglang", "'speculative_algorithm': 'EAGLE', 'disaggregation_mode': 'null'", {"with_mtp": True}),
        ("sglang", "'speculative_algorithm': None, 'disaggregation_mode': 'decode'", {"role": "decode"}),
        ("sglang", "'disable_cuda_graph': True", {"is_eager": True}),
        ("sglang", "'disable_cuda_graph': False", {}),
        ("vllm", "speculative_config=SpeculativeConfig(method='mtp', num_spec_tokens=1)", {"with_mtp": True}),
        ("vllm", "speculative_config=None, enforce_eager=True", {"is_eager": True}),
        ("vllm", "enforce_eager=False", {}),
    ],
)
def test_a_log_tells_of_speculation_of_pools_and_of_graphs(engine, arguments, expected, read):
    before, key = {"sglang": (SGLANG, "'tp_size'"), "vllm": (VLLM, "tensor_parallel_size")}[engine]
    plain, found = (
        request_of_log(read(text), MemoryRequest(gpu=H200), frozenset())
        for text in (before, before.replace(key, f"{arguments}, {key}"))
    )
    assert found == replace(plain, **expected, logged=plain.logged | expected.keys())


def test_a_role_that_is_given_goes_before_the_log(read):
    log = read(SGLANG.replace("'tp_size'", "'disaggregation_mode': 'decode', 'tp_size'"))
    for given, role in ((frozenset(), "decode"), (frozenset({"role"}), "prefill")):
        assert request_of_log(log, MemoryRequest(gpu=H200, role="prefill"), given).role == role


def test_running_requests_are_taken_where_they_are_those_of_all_ranks(read):
    replicas = SGLANG.replace("'attn_dp_size': 1", "'attn_dp_size': 8")
    for text, most in (
        (SGLANG, 48),
        (replicas, None),
        (VLLM.replace("'max_model_len'", "'max_num_seqs': 9, 'max_model_len'"), None),
    ):
        assert request_of_log(read(text), MemoryRequest(gpu=H200), frozenset()).max_running_requests == most


def test_the_model_is_called_as_the_log_calls_it(read):
    assert model_of_log(read(SGLANG)) == "zai-org/GLM-5.2-FP8"
    assert model_of_log(read(VLLM)) == "zai-org/GLM-4.7"
    assert model_of_log(read(SGLANG.partition("\n")[2])) == ""


def test_a_vllm_log_has_the_ranks_of_one_replica(read):
    found = request_of_log(read(VLLM), MemoryRequest(gpu=H200), frozenset())
    assert found == MemoryRequest(
        gpu=H200,
        engine="vllm",
        parallel=Parallel(tp=8, ep=8, dp_attention=2),
        fraction=0.95,
        logged=LOGGED,
        context=65_536,
        kv_dtype=KvDtype.FP8,
    )
    assert found.parallel.flags("vllm") == ("--tensor-parallel-size 4 --data-parallel-size 2 --enable-expert-parallel")


def test_what_no_log_tells_stays_as_asked(read):
    request = MemoryRequest(
        gpu=GPUS["b200"],
        scheme=INT4,
        kv_layout=KvLayout.RAW,
        role="decode",
        with_mtp=True,
        is_eager=True,
        concurrency=7,
    )
    found = request_of_log(read(SGLANG), request, frozenset())
    for name in ("gpu", "scheme", "kv_layout", "role", "with_mtp", "is_eager", "concurrency"):
        assert getattr(found, name) == getattr(request, name)


GIVEN = {
    "tp": 4,
    "ep": 2,
    "pp": 3,
    "dp_attention": 4,
    "dcp": 2,
    "fraction": 0.5,
    "context": 77,
    "kv_dtype": KvDtype.BF16,
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_is_given_goes_before_the_log(name, read):
    in_parallel = name in SIZES
    request = MemoryRequest(
        gpu=H200,
        parallel=Parallel(**({name: GIVEN[name]} if in_parallel else {})),
        **({} if in_parallel else {name: GIVEN[name]}),
    )
    log = read(SGLANG.replace("'tp_size': 8", "'tp_size': 16").replace("_size': 1,", "_size': 8,"))
    kept, taken = (request_of_log(log, request, given) for given in (frozenset({name}), frozenset()))
    value = GIVEN[name]
    assert (getattr(kept.parallel, name) if in_parallel else getattr(kept, name)) == value
    assert (getattr(taken.parallel, name) if in_parallel else getattr(taken, name)) != value
    others = {"parallel": taken.parallel} if not in_parallel else {}
    for other, from_log in {"fraction": 0.87, "context": 131_072, "kv_dtype": KvDtype.FP8, **others}.items():
        assert other == name or getattr(kept, other) == from_log
    if in_parallel:
        expected = {"tp": 16, "ep": 8, "pp": 8, "dp_attention": 8, "dcp": 8}
        assert sizes(kept) == {**expected, name: value}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"dp_attention": 4}, Parallel(tp=16, ep=16, dp_attention=4)),
        ({"tp": 16}, Parallel(tp=16, ep=16, dp_attention=2)),
        ({"dp_attention": 4, "ep": 1}, Parallel(tp=16, ep=1, dp_attention=4)),
    ],
)
def test_replicas_that_are_given_multiply_the_ranks_that_vllm_logs(given, expected, read):
    request = MemoryRequest(gpu=H200, parallel=Parallel(**given))
    assert request_of_log(read(VLLM), request, frozenset(given)).parallel == expected
    assert plan_of_log(read(VLLM), model("glm-4.7"), request, frozenset(given)).request.parallel == expected


def test_what_is_given_is_not_looked_at_in_the_log(read):
    log = read(VLLM.replace("data_parallel_size=2", "data_parallel_size=99999"))
    request = MemoryRequest(gpu=H200, parallel=Parallel(dp_attention=2))
    assert request_of_log(log, request, frozenset({"dp_attention"})).parallel == Parallel(tp=8, ep=8, dp_attention=2)
    with pytest.raises(SourceError, match="line 4: dp 99999 is not possible"):
        request_of_log(log, request, frozenset())


def test_what_the_model_does_not_have_is_left_out_of_the_plan(read):
    text = SGLANG.replace("'tp_size'", "'speculative_algorithm': 'EAGLE', 'tp_size'")
    longer = text.replace("131072", "262144")
    for name, logged, expected in (
        ("kimi-k2", text, (False, 131_072)),
        ("glm-5.2", text, (True, 131_072)),
        ("kimi-k2", longer, (False, None)),
        ("glm-5.2", longer, (True, 262_144)),
    ):
        planned = plan_of_log(read(logged), model(name), MemoryRequest(gpu=H200), frozenset()).request
        assert (planned.with_mtp, planned.context) == expected
    request = MemoryRequest(gpu=H200, context=262_144)
    with pytest.raises(UsageError, match=r"^--context 262144 is more than"):  # the user's mistake and not the log's
        plan_of_log(read(text), model("kimi-k2"), request, frozenset({"context"}))


def test_a_log_that_does_not_go_with_the_model_is_an_error_of_the_log(read):
    log = read(SGLANG.replace("'tp_size': 8", "'tp_size': 7"))
    with pytest.raises(SourceError, match="with what this log says of the server: sglang cannot split") as caught:
        plan_of_log(log, model("glm-5.2"), MemoryRequest(gpu=H200), frozenset())
    assert caught.value.remedy == "name the model that was served, or the option that the log has wrong"
    excerpt = read("".join(SGLANG.splitlines(keepends=True)[1:3]))  # tells nothing, so that the mistake is the user's
    with pytest.raises(UsageError, match="sglang cannot split"):
        plan_of_log(excerpt, model("glm-5.2"), MemoryRequest(gpu=H200, parallel=Parallel(tp=7)), frozenset({"tp"}))


def test_a_log_without_arguments_leaves_the_request_alone(read):
    excerpt = "".join(SGLANG.splitlines(keepends=True)[1:3])
    request = MemoryRequest(gpu=H200, parallel=Parallel(tp=4, ep=2), fraction=0.7, context=99, kv_dtype=KvDtype.BF16)
    assert request_of_log(read(excerpt), request, frozenset()) == request


@pytest.mark.parametrize(
    ("logged", "expected"),
    [
        ("bfloat16", KvDtype.BF16),
        ("float8_e4m3fn", KvDtype.FP8),
        ("float8_e4m3fnuz", KvDtype.FP8),
        ("float16", KvDtype.BF16),
    ],
)
def test_kv_dtypes_by_the_words_of_sglang(logged, expected, read):
    log = read(SGLANG.replace("torch.float8_e4m3fn", f"torch.{logged}"))
    assert request_of_log(log, MemoryRequest(gpu=H200), frozenset()).kv_dtype == expected


@pytest.mark.parametrize(
    ("logged", "expected"),
    [
        ("auto", None),
        ("bfloat16", KvDtype.BF16),
        ("torch.bfloat16", KvDtype.BF16),
        ("fp8", KvDtype.FP8),
        ("fp8_e5m2", KvDtype.FP8),
    ],
)
def test_kv_dtypes_by_the_words_of_vllm(logged, expected, read):
    log = read(VLLM.replace("kv_cache_dtype=fp8_e4m3", f"kv_cache_dtype={logged}"))
    assert request_of_log(log, MemoryRequest(gpu=H200), frozenset()).kv_dtype == expected


def test_the_packed_layout_is_told_by_its_word(read):
    log = read(VLLM.replace("kv_cache_dtype=fp8_e4m3", "kv_cache_dtype=fp8_ds_mla"))
    for request, given, expected in (
        ({}, (), (KvDtype.FP8, KvLayout.PACKED)),
        ({"kv_layout": KvLayout.RAW}, (), (KvDtype.FP8, KvLayout.RAW)),
        ({"kv_dtype": KvDtype.FP8}, ("kv_dtype",), (KvDtype.FP8, None)),
    ):
        found = request_of_log(log, MemoryRequest(gpu=GPUS["b200"], **request), frozenset(given))
        assert (found.kv_dtype, found.kv_layout) == expected


def test_the_log_of_another_engine_is_refused_where_one_is_given(read):
    with pytest.raises(UsageError, match="the log is vllm's, --engine says sglang") as caught:
        request_of_log(read(VLLM), MemoryRequest(gpu=H200, engine="sglang"), frozenset({"engine"}))
    assert caught.value.remedy == "leave --engine out"
    log = read(VLLM)
    assert request_of_log(log, MemoryRequest(gpu=H200, engine="vllm"), frozenset({"engine"})).engine == "vllm"


def test_figures_of_sglang(check):
    """By hand: 88.447 = 88.177 + 0.270 of copies; 137.4 x 0.87 - 88.447 - 0.35 = 30.741; 30.741 GiB / 53,940 B."""
    rows = check("glm-5.2", SGLANG)
    found = [
        (row.name, row.unit, round(row.planned, 3), row.measured, row.line) for row in rows.values() if row.planned
    ]
    assert found == [
        ("weights and copies", "GiB", 88.447, 88.9, 4),
        ("free before loading", "GiB", 137.4, 137.2, 3),
        ("free after loading", "GiB", 48.603, 48.3, 5),
        ("KV pool", "GiB", 30.741, 31.15, 6),
        ("KV tokens", "tokens", 611_904, 620_032, 6),
        ("fraction", "", 0.87, 0.87, 1),
        ("KV bytes per token", "B", 53_940, pytest.approx(31.15 * 2**30 / 620_032), 6),
    ]
    assert {name: round(row.difference_percent, 2) for name, row in rows.items() if row.planned} == {
        "weights and copies": -0.51,
        "free before loading": 0.15,
        "free after loading": 0.63,
        "KV pool": -1.31,
        "KV tokens": -1.31,
        "fraction": 0.0,
        "KV bytes per token": -0.01,
    }
    assert rows["CUDA graphs"] == Comparison(name="CUDA graphs", unit="GiB", planned=None, measured=1.66, line=8)
    assert rows["CUDA graphs"].difference_percent is None


def test_figures_of_vllm(check):
    """By hand: 139.8 x 0.95 - weights - 8.1 of overhead; 92 layers x 2 KV heads x 2 x 128 x 1 B = 47,104 B."""
    rows = check("glm-4.7", VLLM)
    weights = rows["weights and copies"].planned
    assert list(rows) == ["weights and copies", "KV pool", "KV tokens", "fraction", "CUDA graphs", "KV bytes per token"]
    assert rows["KV pool"].planned == pytest.approx(139.8 * 0.95 - weights - 8.1)
    assert rows["KV bytes per token"].planned == 47_104
    assert rows["KV tokens"].planned == rows["KV pool"].planned * 2**30 // 47_104 // 16 * 16
    measured = {name: (row.measured, row.line) for name, row in rows.items()}
    assert measured == {
        "weights and copies": (86.5, 3),
        "KV pool": (38.25, 6),
        "KV tokens": (871_904, 7),
        "fraction": (0.95, 1),
        "CUDA graphs": (2.5, 8),
        "KV bytes per token": (pytest.approx(47_104, abs=1), 7),
    }


def test_sglang_logs_rows_and_each_stands_for_as_many_tokens_as_dcp_has_slices(check):
    """A pool of 8 slices has rows of 78 x 576 B / 8 and 21 x 132 B a token: eight tokens a row."""
    plain, sliced = (check("glm-5.2", SGLANG.replace("'dcp_size': 1", f"'dcp_size': {dcp}")) for dcp in (1, 8))
    assert plain["KV bytes per token"].planned == 53_940
    assert sliced["KV bytes per token"].planned == 78 * 576 + 8 * 21 * 132
    pool_bytes = sliced["KV pool"].planned * 2**30
    assert sliced["KV tokens"].planned == pytest.approx(pool_bytes / (78 * 576 + 8 * 21 * 132), abs=64)
    assert sliced["KV tokens"].unit == "tokens"


def test_vllm_logs_tokens_whatever_its_dcp(check):
    log = VLLM.replace("decode_context_parallel_size=1", "decode_context_parallel_size=2")
    log = log.replace("GLM-4.7", "GLM-5.2").replace("'enable_expert_parallel': True, ", "")
    rows = check("glm-5.2", log)
    assert rows["KV bytes per token"].planned == (78 * 656 + 21 * 132) / 2
    assert rows["KV tokens"].planned == pytest.approx(
        rows["KV pool"].planned * 2**30 * 2 / (78 * 656 + 21 * 132), abs=64
    )


def test_the_stage_with_the_least_room_is_compared(check):
    rows = check("glm-5.2", SGLANG.replace("'pp_size': 1", "'pp_size': 2"))
    request = MemoryRequest(
        gpu=H200, parallel=Parallel(tp=8, pp=2), fraction=0.87, context=131_072, kv_dtype=KvDtype.FP8
    )
    stages = make_memory_plan(model("glm-5.2"), request, with_advice=False).stages
    tokens = [stage.num_tokens.mid for stage in stages]
    assert tokens[0] != tokens[1]
    least = stages[tokens.index(min(tokens))]
    assert rows["KV tokens"].planned == min(tokens)
    assert rows["KV pool"].planned == least.budget.pool.mid
    assert rows["KV bytes per token"].planned == float(least.cell.num_bytes)
    assert rows["weights and copies"].planned == least.weights_gib + least.copies_gib


def test_only_what_was_logged_is_compared(check):
    lines = SGLANG.splitlines(keepends=True)
    assert list(check("glm-5.2", "".join(lines[:3]))) == ["free before loading", "fraction"]
    without_pool_size = SGLANG.replace(", KV size: 31.15 GB", "")
    assert "KV tokens" in check("glm-5.2", without_pool_size)
    assert {"KV pool", "KV bytes per token"}.isdisjoint(check("glm-5.2", without_pool_size))


def test_nothing_is_divided_by_a_measured_zero(check):
    rows = check("glm-5.2", SGLANG.replace("620032", "0").replace("31.15", "0.00"))
    assert (rows["KV tokens"].measured, rows["KV tokens"].difference_percent) == (0, None)
    assert (rows["KV pool"].measured, rows["KV pool"].difference_percent) == (0, None)
    assert "KV bytes per token" not in rows


def test_a_log_of_the_planned_server_raises_no_doubt(check):
    assert doubts(list(check("glm-5.2", SGLANG).values())) == ()
    assert doubts(list(check("glm-4.7", VLLM).values())) == ()


@pytest.mark.parametrize(
    ("text", "options", "begin", "end"),
    [
        (
            SGLANG,
            {"scheme": INT4},
            "weights and copies: planned 54.62",
            "name the checkpoint that was served, or give --to",
        ),
        (SGLANG, {"kv_layout": KvLayout.RAW}, "KV bytes per token: planned 47,700", "see --kv-dtype and --kv-layout"),
        (SGLANG.replace("=137.", "=122."), {}, "free before loading: planned 137.4", "give --gpu, or --gpu-gib"),
    ],
    ids=["scheme", "layout", "GPU"],
)
def test_a_figure_that_is_far_off_names_what_differs(text, options, begin, end, check):
    (doubt,) = doubts(list(check("glm-5.2", text, **options).values()))
    assert doubt.startswith(begin)
    assert doubt.endswith(end)


def test_a_fraction_that_was_logged_is_not_scaled_again(read):
    text = SGLANG.replace("'mem_fraction_static': 0.87", "'mem_fraction_static': 0.748")
    log = read(text.replace("'tp_size': 8", "'tp_size': 4"))
    given = MemoryRequest(gpu=GPUS["mi355x"], parallel=Parallel(tp=4), fraction=0.748, context=131_072)
    logged = request_of_log(log, MemoryRequest(gpu=GPUS["mi355x"]), frozenset())
    fractions = [
        make_memory_plan(model("kimi-k2"), request, with_advice=False).stages[0].budget.fraction
        for request in (given, logged)
    ]
    assert fractions == [pytest.approx(0.748 * 0.85), 0.748]


def test_a_number_of_requests_that_is_given_goes_before_the_log(read):
    request = MemoryRequest(gpu=H200, max_running_requests=4)
    assert request_of_log(read(SGLANG), request, frozenset({"max_running_requests"})).max_running_requests == 4
    assert request_of_log(read(SGLANG), request, frozenset()).max_running_requests == 48


@pytest.mark.parametrize(
    ("word", "with_mtp"), [("EAGLE", True), ("NEXTN", True), ("NGRAM", False), ("STANDALONE", False)]
)
def test_only_what_drafts_with_a_layer_counts_one(word, with_mtp, read):
    text = SGLANG.replace("'tp_size'", f"'speculative_algorithm': '{word}', 'tp_size'")
    assert request_of_log(read(text), MemoryRequest(gpu=H200), frozenset()).with_mtp is with_mtp


def test_e5m2_is_fp8_too(read):
    text = SGLANG.replace("float8_e4m3fn", "float8_e5m2").replace("fp8_e4m3", "fp8_e5m2")
    assert request_of_log(read(text), MemoryRequest(gpu=H200), frozenset()).kv_dtype is KvDtype.FP8


@pytest.mark.parametrize("dtype", ["nvfp4", "int8_per_token_head", "fp8_per_token_head"])
def test_a_kv_dtype_that_is_not_planned_is_no_other(dtype, read):
    log = read(VLLM.replace("kv_cache_dtype=fp8_e4m3", f"kv_cache_dtype={dtype}"))
    with pytest.raises(SourceError, match=f"line 4: the KV dtype {dtype} is none that is planned") as caught:
        request_of_log(log, MemoryRequest(gpu=H200), frozenset())
    assert (caught.value.file, caught.value.remedy) == ("server.log", "give --kv-dtype bf16 or fp8")
    given = MemoryRequest(gpu=H200, kv_dtype=KvDtype.FP8)
    assert request_of_log(log, given, frozenset({"kv_dtype"})).kv_dtype is KvDtype.FP8


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("'tp_size': 8", "'tp_size': 0", "line 1: tp 0 is not possible"),
        ("'tp_size': 8", "'tp_size': 99999", "line 1: tp 99999 is not possible"),
        ("'mem_fraction_static': 0.87", "'mem_fraction_static': 1.87", "line 1: fraction 1.87 is not possible"),
        ("'mem_fraction_static': 0.87", "'mem_fraction_static': -1", "line 1: fraction -1.0 is not possible"),
        ("context_len=131072", "context_len=0", "line 9: context 0 is not possible"),
    ],
)
def test_what_no_server_was_started_with_is_an_error_of_the_log(before, after, message, read):
    assert before in SGLANG
    with pytest.raises(SourceError) as caught:
        request_of_log(read(SGLANG.replace(before, after)), MemoryRequest(gpu=H200), frozenset())
    assert str(caught.value) == f"server.log: {message}; pass the log as the server wrote it"


def test_vllm_may_be_given_all_of_a_gpu(read):
    log = read(VLLM.replace("'gpu_memory_utilization': 0.95", "'gpu_memory_utilization': 1.0"))
    found = request_of_log(log, MemoryRequest(gpu=H200, engine="vllm"), frozenset())
    assert found.fraction == 1.0
    plan = make_memory_plan(model("glm-4.7"), found, with_advice=False)
    assert any("refuses to start" in reason for reason in plan.reasons)


def doubted(log, name, request=None, given=()):
    request = request or MemoryRequest(gpu=H200)
    given = frozenset(given)
    return doubts_of_start(log, model(name), plan_of_log(log, model(name), request, given), given)


def test_what_was_read_from_the_log_is_said_to_be_the_logs(read):
    made = plan_of_log(read(SGLANG), model("glm-5.2"), MemoryRequest(gpu=H200), frozenset())
    flags = "--tp-size 8 --context-length 131072 --mem-fraction-static 0.87 --kv-cache-dtype fp8_e4m3"
    assert f"read from the log: {flags} --max-running-requests 48" in made.assumptions
    assert made.kv_format.chosen_by == "the log, the rest by sglang on sm90"
    assert "(--max-running-requests as logged)" in made.stages[0].budget.overhead_source
    given = frozenset({"kv_dtype", "fraction", "max_running_requests"})
    request = MemoryRequest(gpu=H200, kv_dtype=KvDtype.FP8, fraction=0.87, max_running_requests=48)
    made = plan_of_log(read(SGLANG), model("glm-5.2"), request, given)
    assert "read from the log: --tp-size 8 --context-length 131072" in made.assumptions
    assert made.kv_format.chosen_by.startswith("--kv-dtype")
    assert "(--max-running-requests as given)" in made.stages[0].budget.overhead_source


def test_options_that_the_log_contradicts_are_doubted(read):
    request = MemoryRequest(gpu=H200, parallel=Parallel(tp=16), fraction=0.8, kv_dtype=KvDtype.BF16, context=131_072)
    assert doubted(read(SGLANG), "glm-5.2", request, {"tp", "fraction", "kv_dtype", "context"}) == (
        "--tp 16 is planned as given; line 1 of the log says tp 8",
        "--mem-fraction-static 0.8 is planned as given; line 1 of the log says fraction 0.87",
        "--kv-dtype bf16 is planned as given; line 6 of the log says kv dtype float8_e4m3fn",
    )
    same = MemoryRequest(gpu=H200, parallel=Parallel(tp=8, ep=8, dp_attention=2))  # as vLLM's 4 ranks of 2 replicas
    assert doubted(read(VLLM), "glm-4.7", same, {"tp", "ep", "dp_attention"}) == ()
    without = MemoryRequest(gpu=H200)
    assert doubted(read(VLLM), "glm-4.7", without, {"ep"}) == (
        "--ep 1 is planned as given; line 1 of the log says expert parallel True",
    )


def test_another_version_is_doubted(read):
    assert doubted(read(VLLM), "glm-4.7") == ()
    assert doubted(read(VLLM.replace("v0.33.0", "v0.26.0")), "glm-4.7") == (
        "the log is of vLLM 0.26.0, planned is 0.33.0: rules and defaults may differ",
    )


def test_a_context_beyond_the_models_is_doubted(read):
    (doubt,) = doubted(read(SGLANG.replace("131072", "262144")), "kimi-k2")
    assert doubt.startswith("line 9 of the log says a context of 262,144 tokens, more than the 131,072")
    assert doubted(read(SGLANG.replace("131072", "262144")), "glm-5.2") == ()


def test_the_kv_dtype_that_sglang_chose_is_enough(read):
    lines = SGLANG.splitlines(keepends=True)
    chosen = "[2026-10-02 09:02:30 TP0] Using KV cache dtype: torch.float8_e4m3fn\n"
    log = read("".join([*lines[1:5], chosen, lines[-2], lines[-1]]))
    assert request_of_log(log, MemoryRequest(gpu=H200), frozenset()).kv_dtype is KvDtype.FP8


@pytest.mark.parametrize(
    ("given", "options"),
    [({"dcp"}, {"parallel": Parallel(dcp=3)}), ({"tp"}, {"parallel": Parallel(tp=7)}), ((), {"kv_layout": "packed"})],
)
def test_an_option_that_the_model_refuses_is_no_error_of_the_log(given, options, read):
    name = "kimi-k2" if "kv_layout" in options else "glm-5.2"
    if "kv_layout" in options:
        options = {"kv_layout": KvLayout.PACKED}
    with pytest.raises(UsageError) as caught:
        plan_of_log(read(SGLANG), model(name), MemoryRequest(gpu=H200, **options), frozenset(given))
    assert "log says" not in caught.value.message
    assert caught.value.remedy


def test_ranks_times_replicas_are_bounded_in_the_logs_own_words(read):
    text = VLLM.replace("tensor_parallel_size=4", "tensor_parallel_size=4096")
    log = read(text.replace("data_parallel_size=2", "data_parallel_size=4096"))
    with pytest.raises(SourceError, match="line 4: tp 4096 of 4096 replicas is not possible"):
        request_of_log(log, MemoryRequest(gpu=H200), frozenset())
