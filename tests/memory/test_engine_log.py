"""Excerpts follow the format strings of SGLang 0.5.23 and vLLM 0.33.0, or of the version that a test names."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from quantkit.errors import SourceError
from quantkit.memory import engine_log
from quantkit.memory.engine_log import EngineLog, read_engine_log
from quantkit.memory.engine_log_lines import ARGUMENTS, KEYS, NUMBERS, LoggedValue

# SGLang 0.5.23: GLM-5.2-FP8 with MTP on two of eight ranks
SGLANG = """\
[2026-10-02 09:00:01] server_args={'model_path': 'zai-org/GLM-5.2-FP8', 'tokenizer_path': 'zai-org/GLM-5.2-FP8', \
'context_length': None, 'page_size': 64, 'mem_fraction_static': 0.886, 'max_running_requests': 48, 'tp_size': 8, \
'pp_size': 1, 'dp_size': 1, 'attn_dp_size': 1, 'dcp_size': 1, 'ep_size': 1, 'kv_cache_dtype': 'fp8_e4m3', \
'speculative_algorithm': 'EAGLE', 'speculative_draft_model_path': 'zai-org/GLM-5.2-FP8', 'moe_dense_tp_size': None}
[2026-10-02 09:00:20 TP0] Memory baseline taken. mem usage=0.00 GB
[2026-10-02 09:00:20 TP0] Load weight begin. avail mem=137.40 GB
[2026-10-02 09:00:20 TP1] Load weight begin. avail mem=137.35 GB
Loading safetensors checkpoint shards: 100% Completed | 142/142 [01:02<00:00,  2.28it/s]
[2026-10-02 09:02:20 TP0] Load weight end. elapsed=120.11 s, type=GlmMoeDsaForCausalLM, quant=fp8, \
avail mem=48.64 GB, mem usage=88.76 GB.
[2026-10-02 09:02:21 TP1] Load weight end. elapsed=121.02 s, type=GlmMoeDsaForCausalLM, quant=fp8, \
avail mem=48.57 GB, mem usage=88.78 GB.
[2026-10-02 09:02:21 TP0] Load weight begin. avail mem=48.60 GB
[2026-10-02 09:02:22 TP1] Load weight begin. avail mem=48.55 GB
[2026-10-02 09:02:40 TP0] Load weight end. elapsed=18.30 s, type=GlmMoeDsaForCausalLMNextN, quant=fp8, \
avail mem=46.80 GB, mem usage=1.80 GB.
[2026-10-02 09:02:41 TP1] Load weight end. elapsed=18.90 s, type=GlmMoeDsaForCausalLMNextN, quant=fp8, \
avail mem=46.73 GB, mem usage=1.82 GB.
[2026-10-02 09:02:42 TP0] KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 609216, KV size: 30.61 GB
[2026-10-02 09:02:42 TP1] KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 609216, KV size: 30.60 GB
[2026-10-02 09:02:42 TP0] Memory pool end. avail mem=16.08 GB
[2026-10-02 09:02:43 TP0] KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 609216, KV size: 0.45 GB
[2026-10-02 09:02:43 TP1] KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 609216, KV size: 0.45 GB
[2026-10-02 09:02:50 TP0] Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=4, avail mem=15.90 GB
[2026-10-02 09:03:01 TP0] Capture target verify CUDA graph end. bs=[1, 2, 4], elapsed=11.41 s, mem usage=1.66 GB, \
avail mem=14.24 GB.
[2026-10-02 09:03:01 TP1] Capture target verify CUDA graph end. bs=[1, 2, 4], elapsed=11.41 s, mem usage=1.70 GB, \
avail mem=14.10 GB.
[2026-10-02 09:03:05 TP0] Capture draft decode CUDA graph end. elapsed=2.10 s, mem usage=0.21 GB, avail mem=14.03 GB.
[2026-10-02 09:03:08 TP0] max_total_num_tokens=609216, chunked_prefill_size=8192, max_prefill_tokens=16384, \
max_running_requests=48, context_len=202752, available_gpu_mem=14.03 GB
"""

# SGLang of 2025 (0.4.x): one GPU without a rank, K and V apart, ServerArgs as a dataclass
SGLANG_OLD = """\
[2025-07-22 10:00:00] server_args=ServerArgs(model_path='Qwen/Qwen3-8B', tokenizer_path='Qwen/Qwen3-8B', \
mem_fraction_static=0.93, max_running_requests=None, context_length=None, tp_size=1, pp_size=1, kv_cache_dtype='auto', \
dp_size=1, ep_size=1)
[2025-07-22 10:00:09] Init torch distributed ends. mem usage=0.00 GB
[2025-07-22 10:00:10] Load weight begin. avail mem=78.56 GB
[2025-07-22 10:00:30] Load weight end. type=Qwen3ForCausalLM, dtype=torch.bfloat16, avail mem=63.20 GB, \
mem usage=15.36 GB.
[2025-07-22 10:00:31] KV Cache is allocated. #tokens: 367404, K size: 28.23 GB, V size: 28.24 GB
[2025-07-22 10:00:31] Memory pool end. avail mem=6.60 GB
[2025-07-22 10:00:45] Capture cuda graph end. Time elapsed: 11.41 s. mem usage=1.05 GB. avail mem=5.55 GB.
[2025-07-22 10:00:46] max_total_num_tokens=367404, chunked_prefill_size=8192, max_prefill_tokens=16384, \
max_running_requests=4096, context_len=40960, available_gpu_mem=5.55 GB
"""

# vLLM 0.33.0: GLM-5.1-FP8, two of eight workers
VLLM = """\
(APIServer pid=11) INFO 10-02 09:00:01 [startup.py:35] vLLM server version 0.33.0, serving model zai-org/GLM-5.1-FP8
(APIServer pid=11) INFO 10-02 09:00:01 [startup.py:96] non-default args: {'model': 'zai-org/GLM-5.1-FP8', \
'max_model_len': 202752, 'tensor_parallel_size': 8, 'enable_expert_parallel': True, 'gpu_memory_utilization': 0.9, \
'max_num_seqs': 256}
(EngineCore pid=22) INFO 10-02 09:00:09 [core.py:139] Initializing a V1 LLM engine (v0.33.0) with config: \
model='zai-org/GLM-5.1-FP8', speculative_config=None, tokenizer='zai-org/GLM-5.1-FP8', dtype=torch.bfloat16, \
max_seq_len=202752, tensor_parallel_size=8, pipeline_parallel_size=1, data_parallel_size=1, \
decode_context_parallel_size=1, dcp_comm_backend=a2a, quantization=fp8, kv_cache_dtype=fp8, device_config=cuda
(Worker_TP0_EP0 pid=33) INFO 10-02 09:00:30 [mla_attention.py:530] Using fp8_ds_mla KV cache format for \
FLASHMLA_SPARSE backend.
(Worker_TP0_EP0 pid=33) INFO 10-02 09:02:30 [model_runner.py:428] Model loading took 89.39 GiB memory and \
118.204411 seconds
(Worker_TP1_EP1 pid=34) INFO 10-02 09:02:31 [model_runner.py:428] Model loading took 89.41 GiB memory and \
118.911020 seconds
(Worker_TP0_EP0 pid=33) INFO 10-02 09:02:50 [gpu_worker.py:772] Available KV cache memory: 32.06 GiB
(Worker_TP1_EP1 pid=34) INFO 10-02 09:02:50 [gpu_worker.py:772] Available KV cache memory: 32.04 GiB
(Worker_TP0_EP0 pid=33) INFO 10-02 09:02:50 [gpu_worker.py:787] CUDA graph memory profiling is enabled (default since \
v0.21.0). The current --gpu-memory-utilization=0.9000 is equivalent to --gpu-memory-utilization=0.8823 without it.
(EngineCore pid=22) INFO 10-02 09:02:51 [kv_cache_utils.py:1147] GPU KV cache size: 559,616 tokens, \
Maximum concurrency for 202,752 tokens per request: 2.76x
(Worker_TP0_EP0 pid=33) INFO 10-02 09:03:20 [model_runner.py:1163] Graph capturing finished in 25 secs, took 2.38 GiB
(Worker_TP1_EP1 pid=34) INFO 10-02 09:03:20 [model_runner.py:1163] Graph capturing finished in 25 secs, took 2.47 GiB
"""


def read(tmp_path: Path, content: str | bytes) -> EngineLog:
    path = tmp_path / "engine.log"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_engine_log(path)


def values(log: EngineLog) -> dict[str, float | int | str]:
    return {key: logged.value for key, logged in log.values.items()}


def failure(tmp_path: Path, content: str | bytes) -> str:
    with pytest.raises(SourceError) as caught:
        read(tmp_path, content)
    assert caught.value.exit_code == 3
    assert caught.value.remedy
    return str(caught.value)


def test_sglang_adds_the_draft_worker_to_each_rank(tmp_path: Path) -> None:
    log = read(tmp_path, SGLANG)
    assert log.engine == "sglang"
    assert values(log) == {
        "speculation": "EAGLE",
        "model": "zai-org/GLM-5.2-FP8",
        "weights_gib": 90.6,
        "free_before_load_gib": 137.35,
        "free_after_load_gib": 46.73,
        "kv_pool_gib": 31.05,
        "kv_tokens": 609216,
        "kv_dtype": "float8_e4m3fn",
        "graph_gib": 1.87,
        "fraction": 0.886,
        "tp": 8,
        "pp": 1,
        "dp": 1,
        "ep": 1,
        "dcp": 1,
        "max_running_requests": 48,
        "context": 202752,
    }


def test_a_value_says_where_it_stands(tmp_path: Path) -> None:
    log = read(tmp_path, SGLANG)
    assert log.values["free_before_load_gib"] == LoggedValue(
        value=137.35, line=4, text="[2026-10-02 09:00:20 TP1] Load weight begin. avail mem=137.35 GB"
    )
    assert log.values["weights_gib"].line == 7
    assert log.values["fraction"].line == 1
    assert len(log.values["fraction"].text) == 200
    assert log.values["kv_tokens"].value.__class__ is int


def test_sglang_of_2025_on_one_gpu(tmp_path: Path) -> None:
    assert values(read(tmp_path, SGLANG_OLD)) == {
        "model": "Qwen/Qwen3-8B",
        "weights_gib": 15.36,
        "free_before_load_gib": 78.56,
        "free_after_load_gib": 63.2,
        "kv_pool_gib": 56.47,
        "kv_tokens": 367404,
        "kv_dtype": "auto",
        "graph_gib": 1.05,
        "fraction": 0.93,
        "tp": 1,
        "pp": 1,
        "ep": 1,
        "max_running_requests": 4096,
        "context": 40960,
    }


def test_sglang_that_loads_the_draft_behind_the_first_pool(tmp_path: Path) -> None:
    """The order of SGLang 0.4 and 0.5.0."""
    log = read(
        tmp_path,
        """\
[2025-10-01 10:00:00 TP0] Load weight begin. avail mem=139.00 GB
[2025-10-01 10:02:00 TP0] Load weight end. type=Glm4MoeForCausalLM, dtype=torch.bfloat16, avail mem=54.00 GB, \
mem usage=85.00 GB.
[2025-10-01 10:02:01 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 900000, K size: 19.80 GB, \
V size: 19.80 GB
[2025-10-01 10:02:30 TP0] Capture cuda graph end. Time elapsed: 20.01 s. mem usage=1.50 GB. avail mem=12.00 GB.
[2025-10-01 10:02:31 TP0] Load weight begin. avail mem=11.90 GB
[2025-10-01 10:02:40 TP0] Load weight end. type=Glm4MoeForCausalLMNextN, dtype=torch.bfloat16, avail mem=10.40 GB, \
mem usage=1.50 GB.
[2025-10-01 10:02:41 TP0] KV Cache is allocated. dtype: torch.float16, #tokens: 900000, K size: 0.22 GB, \
V size: 0.22 GB
""",
    )
    assert values(log) == {
        "weights_gib": 86.5,
        "free_before_load_gib": 139.0,
        "free_after_load_gib": 54.0,
        "kv_pool_gib": 40.04,
        "kv_tokens": 900000,
        "kv_dtype": "bfloat16",
        "graph_gib": 1.5,
    }


def test_ranks_of_sglang_are_told_apart_by_their_whole_prefix(tmp_path: Path) -> None:
    """With attention DP and milliseconds: 'DP1 TP8 EP8', not only TP."""
    log = read(
        tmp_path,
        """\
[2026-10-02 09:00:01] server_args={'model_path': 'moonshotai/Kimi-K2.5', 'tp_size': 16, 'dp_size': 1, 'attn_dp_size': 2}
[2026-10-02 09:02:20.123 DP0 TP0 EP0] Load weight end. elapsed=1.0 s, type=K, avail mem=60.00 GB, mem usage=40.00 GB.
[2026-10-02 09:02:20.124 DP1 TP8 EP8] Load weight end. elapsed=1.0 s, type=K, avail mem=61.00 GB, mem usage=39.00 GB.
[2026-10-02 09:02:21.001 DP0 TP0 EP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 700032, KV size: 45.81 GB
[2026-10-02 09:02:21.002 DP1 TP8 EP8] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 698048, KV size: 45.68 GB
[2026-10-02 09:03:08.500 DP0 TP0 EP0] max_total_num_tokens=700032, max_running_requests=2730, context_len=131072
[2026-10-02 09:03:08.501 DP1 TP8 EP8] max_total_num_tokens=698048, max_running_requests=2726, context_len=131072
""",
    )
    assert values(log) == {
        "model": "moonshotai/Kimi-K2.5",
        "weights_gib": 40.0,
        "free_after_load_gib": 60.0,
        "kv_pool_gib": 45.68,
        "kv_tokens": 698048,
        "kv_dtype": "bfloat16",
        "tp": 16,
        "dp": 2,
        "max_running_requests": 2726,
        "context": 131072,
    }


def test_sglang_replicas_are_attention_replicas_where_the_older_spelling_says_so(tmp_path: Path) -> None:
    whole_servers = SGLANG.replace("'dp_size': 1", "'dp_size': 4")
    assert read(tmp_path, whole_servers).values["dp"].value == 1
    older = whole_servers.replace("'dp_size': 4", "'enable_dp_attention': True, 'dp_size': 4")
    assert read(tmp_path, older).values["dp"].value == 4


def test_sglang_that_sizes_its_pool_behind_the_capture(tmp_path: Path) -> None:
    log = read(
        tmp_path,
        """\
[2026-10-02 09:02:20 TP0] Load weight end. elapsed=1.0 s, type=G, avail mem=60.00 GB, mem usage=40.00 GB.
[2026-10-02 09:02:21 TP0] KV Cache VA upper bound. dtype: torch.bfloat16, #tokens: 999999, K size: 29.00 GB, \
V size: 29.00 GB
[2026-10-02 09:03:01 TP0] Post-capture KV sizing: KV cache allocated. dtype: torch.bfloat16, #tokens: 800000, \
KV size: 46.00 GB, avail mem=9.10 GB
""",
    )
    assert log.values["kv_tokens"].value == 800000
    assert log.values["kv_pool_gib"].value == 46.0
    assert log.values["kv_dtype"].value == "bfloat16"


def test_vllm(tmp_path: Path) -> None:
    log = read(tmp_path, VLLM)
    assert log.engine == "vllm"
    assert values(log) == {
        "model": "zai-org/GLM-5.1-FP8",
        "weights_gib": 89.41,
        "kv_pool_gib": 32.04,
        "kv_tokens": 559616,
        "kv_dtype": "fp8_ds_mla",
        "graph_gib": 2.47,
        "fraction": 0.9,
        "tp": 8,
        "pp": 1,
        "dp": 1,
        "is_expert_parallel": "True",
        "dcp": 1,
        "max_running_requests": 256,
        "context": 202752,
    }
    assert log.values["weights_gib"].line == 6
    assert log.values["is_expert_parallel"].line == 2


def test_vllm_engines_of_data_parallelism_are_one_start(tmp_path: Path) -> None:
    log = read(
        tmp_path,
        """\
(APIServer pid=9) INFO 10-02 09:00:01 [startup.py:96] non-default args: {'enable_expert_parallel': True}
(EngineCore_DP0 pid=1) INFO 10-02 09:00:09 [core.py:139] Initializing a V1 LLM engine (v0.33.0) with config: \
model='zai-org/GLM-4.6-FP8', tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=4, kv_cache_dtype=auto
(Worker_DP0_PP0_TP0 pid=3) INFO 10-02 09:01:00 [model_runner.py:428] Model loading took 23.50 GiB memory and 9.1 seconds
(EngineCore_DP1 pid=2) INFO 10-02 09:01:01 [core.py:139] Initializing a V1 LLM engine (v0.33.0) with config: \
model='zai-org/GLM-4.6-FP8', tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=4, kv_cache_dtype=auto
(Worker_DP1_PP1_TP0 pid=4) INFO 10-02 09:01:09 [model_runner.py:428] Model loading took 22.75 GiB memory and 9.3 seconds
(EngineCore_DP0 pid=1) INFO 10-02 09:01:30 [kv_cache_utils.py:1147] GPU KV cache size: 1,204,224 tokens, \
Maximum concurrency for 131,072 tokens per request: 9.19x
(EngineCore_DP1 pid=2) INFO 10-02 09:01:30 [kv_cache_utils.py:1147] GPU KV cache size: 1,204,208 tokens, \
Maximum concurrency for 131,072 tokens per request: 9.19x
""",
    )
    assert values(log) == {
        "model": "zai-org/GLM-4.6-FP8",
        "weights_gib": 23.5,
        "kv_tokens": 1204208,
        "kv_dtype": "auto",
        "tp": 2,
        "pp": 2,
        "dp": 4,
        "is_expert_parallel": "True",
        "context": 131072,
    }


# two lines, GiB without 'memory'
VLLM_0_11 = """\
(APIServer pid=1) INFO 10-06 09:00:01 [api_server.py:1839] vLLM API server version 0.11.0
(Worker_TP0 pid=3) INFO 10-06 10:51:00 [gpu_model_runner.py:2653] Model loading took 71.9900 GiB and 88.123456 seconds
(Worker_TP0 pid=3) INFO 10-06 10:51:48 [gpu_worker.py:298] Available KV cache memory: 46.80 GiB
(EngineCore_DP0 pid=2) INFO 10-06 10:51:48 [kv_cache_utils.py:1087] GPU KV cache size: 715,072 tokens
(EngineCore_DP0 pid=2) INFO 10-06 10:51:48 [kv_cache_utils.py:1091] Maximum concurrency for 131,072 tokens per \
request: 5.46x
"""
# vLLM 0.6 to 0.8
VLLM_V0_ENGINE = """\
INFO 04-12 08:20:01 [api_server.py:1040] args: Namespace(subparser='serve', model_tag='x', config='', \
model='deepseek-ai/DeepSeek-R1', tensor_parallel_size=16, gpu_memory_utilization=0.99, max_num_seqs=None, \
enable_expert_parallel=False)
(VllmWorkerProcess pid=521) INFO 04-12 08:21:00 [model_runner.py:1146] Loading model weights took 21.2100 GB and 40 s
(VllmWorkerProcess pid=521) INFO 04-12 08:21:19 [worker.py:267] the current vLLM instance can use total_gpu_memory \
(23.58GiB) x gpu_memory_utilization (0.99) = 23.35GiB
(VllmWorkerProcess pid=521) INFO 04-12 08:21:19 [worker.py:267] model weights take 21.21GiB; non_torch_memory takes \
0.20GiB; PyTorch activation peak memory takes 0.37GiB; the rest of the memory reserved for KV Cache is 1.57GiB.
"""
# 0.33.0 with --kv-cache-memory-bytes
VLLM_POOL_IN_BYTES = """\
(Worker pid=3) INFO 10-02 09:02:30 [model_runner.py:428] Model loading took 54.36 GiB memory and 9.123456 seconds
(Worker pid=3) INFO 10-02 09:02:50 [gpu_worker.py:676] Initial free memory 137.52 GiB, reserved 40.00 GiB memory for \
KV Cache as specified by kv_cache_memory_bytes config and skipped memory profiling.
"""
# 0.33.0 at log level debug, with frontend video decoding
VLLM_DEBUG = """\
(Worker pid=3) DEBUG 10-02 09:02:50 [gpu_worker.py:760] Initial free memory: 137.52 GiB; Requested memory: 0.920000 \
(util), 128.62 GiB
(Worker pid=3) INFO 10-02 09:02:50 [gpu_worker.py:772] Available KV cache memory: 32.06 GiB
(Worker pid=3) INFO 10-02 09:02:50 [gpu_ipc_memory.py:254] Reserving 2.00 GiB of GPU memory for frontend multimodal \
decoding; KV cache memory reduced to 30.06 GiB.
"""


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (VLLM_0_11, {"weights_gib": 71.99, "kv_pool_gib": 46.8, "kv_tokens": 715072, "context": 131072}),
        (
            VLLM_V0_ENGINE,
            {
                "model": "deepseek-ai/DeepSeek-R1",
                "tp": 16,
                "weights_gib": 21.21,
                "fraction": 0.99,
                "kv_pool_gib": 1.57,
            },
        ),
        (VLLM_POOL_IN_BYTES, {"weights_gib": 54.36, "free_before_load_gib": 137.52, "kv_pool_gib": 40.0}),
        (VLLM_DEBUG, {"free_before_load_gib": 137.52, "kv_pool_gib": 30.06}),
    ],
    ids=["0.11", "V0", "pool in bytes", "debug"],
)
def test_other_forms_of_vllm(tmp_path: Path, lines: str, expected: dict[str, float | int | str]) -> None:
    assert values(read(tmp_path, lines)) == expected


def test_the_logo_of_vllm_is_a_banner(tmp_path: Path) -> None:
    ink, bold, off = "\u2588", "\x1b[1m", "\x1b[0m"
    logo = (
        f"(APIServer pid=9) INFO 10-02 09:00:01 [startup.py:35]  {ink}  {bold}{ink}{off}  version {bold}0.33.0{off}\n"
        f"(APIServer pid=9) INFO 10-02 09:00:01 [startup.py:35]  {ink}  {bold}{ink}{off}  model   {bold}org/A{off}\n"
    )
    weights = (
        "(Worker pid=3) INFO 10-02 09:02:30 [model_runner.py:428] Model loading took {} GiB memory and 9.1 seconds\n"
    )
    log = read(tmp_path, logo + weights.format("3.50") + logo.replace("org/A", "org/B") + weights.format("2.25"))
    assert values(log) == {"model": "org/B", "weights_gib": 2.25}


def test_the_last_complete_start_wins(tmp_path: Path) -> None:
    again = SGLANG.replace("88.7", "47.2").replace("609216", "1408960").replace("0.886", "0.9")
    log = read(tmp_path, SGLANG + again)
    assert log.values["weights_gib"].value == 49.1
    assert log.values["kv_tokens"].value == 1408960
    assert log.values["fraction"].value == 0.9
    assert log.values["free_before_load_gib"].line == 25

    broken_off = "".join(SGLANG.splitlines(keepends=True)[:5])
    log = read(tmp_path, SGLANG + broken_off)
    assert log.values["weights_gib"].value == 90.6
    assert log.values["free_before_load_gib"].line == 4


def test_an_incomplete_start_is_better_than_none(tmp_path: Path) -> None:
    log = read(tmp_path, "".join(SGLANG.splitlines(keepends=True)[:7]))
    assert log.values["weights_gib"].value == 88.78
    assert "kv_tokens" not in log.values


def test_vllm_restarted_under_the_same_name(tmp_path: Path) -> None:
    without_banner = "".join(VLLM.splitlines(keepends=True)[2:])
    again = (
        without_banner.replace("89.41", "51.10")
        .replace("pid=", "pid=9")
        .replace("tensor_parallel_size=8", "tensor_parallel_size=4")
    )
    log = read(tmp_path, VLLM + again)
    assert log.values["weights_gib"].value == 89.39
    assert log.values["tp"].value == 4
    assert "max_running_requests" not in log.values


def test_a_log_of_both_engines_is_read_as_the_last(tmp_path: Path) -> None:
    assert read(tmp_path, SGLANG + VLLM).engine == "vllm"
    log = read(tmp_path, VLLM + SGLANG)
    assert log.engine == "sglang"
    assert log.values["weights_gib"].value == 90.6


def test_colours_carriage_returns_and_foreign_prefixes(tmp_path: Path) -> None:
    coloured = VLLM.replace("(Worker", "\x1b[0;36m(Worker").replace(") INFO", ")\x1b[0;0m INFO")
    assert values(read(tmp_path, coloured)) == values(read(tmp_path, VLLM))

    crlf = SGLANG.replace("\n", "\r\n")
    assert read(tmp_path, crlf) == read(tmp_path, SGLANG)

    in_a_container = "".join(f"sglang-1  | {line}" for line in SGLANG.splitlines(keepends=True))
    assert values(read(tmp_path, in_a_container)) == values(read(tmp_path, SGLANG))

    bar = "\rCapturing:   0%|          | 0/3\rCapturing: 100%|\u2588\u2588\u2588| 3/3\r"
    behind_a_bar = SGLANG.replace("[2026-10-02 09:00:20 TP1] Load", bar + "[2026-10-02 09:00:20 TP1] Load")
    assert read(tmp_path, behind_a_bar) == read(tmp_path, SGLANG)


def test_bytes_that_are_no_utf8_are_tolerated(tmp_path: Path) -> None:
    log = read(tmp_path, b"\xff\xfe\x80 bar\n" + SGLANG.encode())
    assert log.values["weights_gib"].value == 90.6
    assert log.values["weights_gib"].line == 8


def test_lines_longer_than_a_buffer_do_not_shift_line_numbers(tmp_path: Path) -> None:
    log = read(tmp_path, "x" * (5 << 19) + "\n" + SGLANG)
    assert log.values["free_before_load_gib"].line == 5


def test_hostile_lines_neither_hang_nor_count(tmp_path: Path) -> None:
    hostile = [
        "server_args=" + "tp_size=" * 100_000,
        "server_args=" + "model_path='" * 80_000,
        "server_args=tp_size=" + "9" * 900_000,
        "KV Cache is allocated. #tokens: " + "9" * 900_000,
        "Load weight end. mem usage=" + "1." * 450_000 + " GB",
        "[2026-10-02 09:00:20" + " TP0" * 200_000 + " Load weight begin. avail mem=1.0 GB",
        "\x1b[" + "0;" * 450_000,
    ]
    log = read(tmp_path, SGLANG_OLD + "\n".join(hostile))
    assert log.values["weights_gib"].value == 15.36
    assert log.values["kv_tokens"].value == 367404


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        read_engine_log(tmp_path / "none.log")
    assert str(caught.value) == (
        "none.log: cannot be read (No such file or directory); check that the file is there and readable"
    )
    with pytest.raises(SourceError, match=r"cannot be read \(Is a directory\)"):
        read_engine_log(tmp_path)


@pytest.mark.parametrize("content", ["", "\n\n  \r\n"])
def test_an_empty_file(tmp_path: Path, content: str) -> None:
    assert failure(tmp_path, content) == "engine.log: is empty; write the server's output, stderr included, into it"


def test_a_binary_file(tmp_path: Path) -> None:
    assert failure(tmp_path, SGLANG.encode() + b"\x1f\x8b\0\n") == (
        "engine.log: is no text: line 22 has a NUL byte; pass the log unpacked, as UTF-8 text"
    )
    assert "has a NUL byte" in failure(tmp_path, SGLANG.encode("utf-16"))


def test_another_program(tmp_path: Path) -> None:
    assert failure(tmp_path, "INFO: listening on port 8000\n") == (
        "engine.log: is no log of SGLang or vLLM: none of their start-up lines is in it; "
        "pass what the server printed from its start on, at log level info"
    )


@pytest.mark.parametrize(("content", "engine"), [(SGLANG, "sglang"), (VLLM, "vllm")])
def test_a_log_that_stops_before_any_memory_line(tmp_path: Path, content: str, engine: str) -> None:
    begin = "".join(content.splitlines(keepends=True)[:2])
    assert failure(tmp_path, begin) == (
        f"engine.log: the log of {engine} stops before its first line about memory; "
        "wait until the server has loaded the weights, and save its log again"
    )


def test_a_log_that_is_too_long(tmp_path: Path) -> None:
    path = tmp_path / "long.log"
    path.write_text(SGLANG)
    os.truncate(path, (256 << 20) + 1)
    with pytest.raises(SourceError) as caught:
        read_engine_log(path)
    assert str(caught.value) == "long.log: is longer than 256 MiB; pass the part up to the first request"


def test_a_pipe_that_grows_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_log, "MAX_LOG_BYTES", 1 << 20)
    assert "is longer than 1 MiB" in failure(tmp_path, "some line\n" * 110_000)


def test_a_pipe_that_nobody_writes_to_is_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match="is empty"):
        read_engine_log(tmp_path / "pipe")


def test_a_pipe_is_waited_for_while_somebody_writes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    command = f"(sleep 0.3; cat {tmp_path}/log) > {tmp_path}/pipe"
    (tmp_path / "log").write_text(SGLANG)
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)  # lets the writer open it
    with subprocess.Popen(["bash", "-c", command]):
        time.sleep(0.1)
        assert read_engine_log(tmp_path / "pipe").values["context"].value == 202752
    os.close(reader)


def test_a_log_of_many_starts_keeps_the_best_and_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    def best(starts: list[engine_log._Start]) -> engine_log._Start:
        lengths.append(len(starts))
        return original(starts)

    original = engine_log._best
    monkeypatch.setattr(engine_log, "_best", best)
    opening = SGLANG.partition("\n")[0].replace("'tp_size': 8", "'tp_size': 4") + "\n"
    failed = opening + "[2026-10-02 09:00:20 TP0] Load weight begin. avail mem=1.00 GB\n"
    log = read(tmp_path, failed * 50 + SGLANG + failed * 50)
    assert (log.values["tp"].value, log.values["context"].value) == (8, 202752)
    assert set(lengths) == {1, 2}


def test_a_start_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_log, "_MAX_NUMBERS", 100)
    line = "(Worker pid=33) INFO 10-02 09:02:50 [gpu_worker.py:772] Available KV cache memory: 30.00 GiB\n"
    assert failure(tmp_path, VLLM + line * 120).startswith("engine.log: has more than 100 figures of one start (line ")


def test_every_key_is_in_the_table() -> None:
    numbers = {number.key for number in NUMBERS}
    assert KEYS.keys() == numbers | {key for names in ARGUMENTS.values() for key in names.values()}
    assert {key for key in numbers if KEYS[key].kind == "word"} == set()
    assert {key for key, rule in KEYS.items() if rule.is_memory} == {
        *("weights_gib", "free_before_load_gib", "free_after_load_gib", "kv_pool_gib", "kv_tokens", "graph_gib")
    }
