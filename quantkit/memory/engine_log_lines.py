"""The start-up lines that tell of memory, and the arguments that servers repeat, as tables.

Formats of SGLang 0.5.23 and vLLM 0.33.0, and older ones of both.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal

from quantkit.engines.parallel import MOST_GPUS, EngineName

NUMBER = r"(-?\d{1,12}(?:\.\d{1,20})?)"
COUNT = r"(\d[\d,]{0,18})"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedValue:
    """A value and where it stands: the line's number, from 1, and its beginning."""

    value: float | int | str
    line: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogKey:
    """What the values of a key are. ``word``: flags too, of which None, False and null say nothing.

    ``of_rank``: of what one rank says of it in the order logged; ``over_ranks``: of all ranks, the tightest.
    ``largest``: what a server can have been started with, above 0. ``is_memory``: whether it tells of memory.
    """

    kind: Literal["count", "number", "word"]
    of_rank: Callable[[list[float]], float] = itemgetter(0)
    over_ranks: Callable[..., LoggedValue] = min
    largest: float | None = None
    is_memory: bool = False


_MOST_TOKENS = 10**9
_SIZE, _WORD = LogKey(kind="count", largest=MOST_GPUS), LogKey(kind="word")
KEYS: Mapping[str, LogKey] = {
    "weights_gib": LogKey(kind="number", of_rank=sum, over_ranks=max, is_memory=True),
    "free_before_load_gib": LogKey(kind="number", is_memory=True),
    "free_after_load_gib": LogKey(kind="number", of_rank=itemgetter(-1), is_memory=True),
    "kv_pool_gib": LogKey(kind="number", of_rank=sum, is_memory=True),
    "kv_tokens": LogKey(kind="count", is_memory=True),
    "graph_gib": LogKey(kind="number", of_rank=sum, over_ranks=max, is_memory=True),
    "fraction": LogKey(kind="number", over_ranks=max, largest=1),
    "max_running_requests": LogKey(kind="count", largest=_MOST_TOKENS),
    "context": LogKey(kind="count", of_rank=itemgetter(-1), largest=_MOST_TOKENS),
    **dict.fromkeys(("tp", "pp", "dp", "ep", "dcp"), _SIZE),
    "replicas": LogKey(kind="count"),
    **dict.fromkeys(("model", "kv_dtype", "role", "speculation"), _WORD),
    **dict.fromkeys(("is_expert_parallel", "is_dp_attention", "is_eager"), _WORD),
}


@dataclass(frozen=True, slots=True)
class LoggedNumber:
    """A line with ``marker`` tells ``key`` wherever ``pattern`` matches."""

    engine: EngineName
    marker: str
    key: str
    pattern: str


NUMBERS: tuple[LoggedNumber, ...] = (
    LoggedNumber("sglang", "Load weight begin", "free_before_load_gib", rf"avail mem={NUMBER} GB"),
    LoggedNumber("sglang", "Load weight end", "free_after_load_gib", rf"avail mem={NUMBER} GB"),
    LoggedNumber("sglang", "Load weight end", "weights_gib", rf"mem usage={NUMBER} GB"),
    LoggedNumber("sglang", "KV Cache is allocated", "kv_tokens", rf"#tokens: {COUNT}"),
    LoggedNumber("sglang", "KV Cache is allocated", "kv_pool_gib", rf"\b(?:KV|K|V) size: {NUMBER} GB"),
    LoggedNumber("sglang", "KV cache allocated", "kv_tokens", rf"#tokens: {COUNT}"),
    LoggedNumber("sglang", "KV cache allocated", "kv_pool_gib", rf"\bKV size: {NUMBER} GB"),
    LoggedNumber("sglang", "graph end", "graph_gib", rf"mem usage={NUMBER} GB"),
    LoggedNumber("sglang", "max_total_num_tokens=", "kv_tokens", rf"\bmax_total_num_tokens={COUNT}"),
    LoggedNumber("sglang", "max_total_num_tokens=", "max_running_requests", rf"\bmax_running_requests={COUNT}"),
    LoggedNumber("sglang", "max_total_num_tokens=", "context", rf"\bcontext_len={COUNT}"),
    LoggedNumber("vllm", "Model loading took", "weights_gib", rf"took {NUMBER} Gi?B"),
    LoggedNumber("vllm", "Loading model weights took", "weights_gib", rf"took {NUMBER} Gi?B"),
    LoggedNumber("vllm", "model weights take", "weights_gib", rf"model weights take {NUMBER} ?GiB"),
    LoggedNumber("vllm", "Initial free memory", "free_before_load_gib", rf"Initial free memory:? {NUMBER} GiB"),
    LoggedNumber("vllm", "Available KV cache memory", "kv_pool_gib", rf"KV cache memory: {NUMBER} GiB"),
    LoggedNumber("vllm", "memory for KV Cache", "kv_pool_gib", rf"reserved {NUMBER} GiB memory for KV Cache"),
    LoggedNumber("vllm", "reserved for KV Cache is", "kv_pool_gib", rf"reserved for KV Cache is {NUMBER} ?GiB"),
    LoggedNumber("vllm", "KV cache memory reduced", "kv_pool_gib", rf"reduced to {NUMBER} GiB"),
    LoggedNumber("vllm", "KV cache size: ", "kv_tokens", rf"KV cache size: {COUNT} tokens"),
    LoggedNumber("vllm", "Maximum concurrency for", "context", rf"concurrency for {COUNT} tokens per request"),
    LoggedNumber("vllm", "Graph capturing finished", "graph_gib", rf"took {NUMBER} GiB"),
    LoggedNumber("vllm", "--gpu-memory-utilization", "fraction", rf"--gpu-memory-utilization(?:=| from ){NUMBER}"),
    LoggedNumber("vllm", "gpu_memory_utilization (", "fraction", rf"gpu_memory_utilization \({NUMBER}\)"),
)
ARGUMENTS: Mapping[EngineName, Mapping[str, str]] = {
    "sglang": {
        "model_path": "model",
        "tp_size": "tp",
        "pp_size": "pp",
        "dp_size": "replicas",
        "enable_dp_attention": "is_dp_attention",
        "attn_dp_size": "dp",
        "ep_size": "ep",
        "dcp_size": "dcp",
        "mem_fraction_static": "fraction",
        "max_running_requests": "max_running_requests",
        "context_length": "context",
        "kv_cache_dtype": "kv_dtype",
        "speculative_algorithm": "speculation",
        "disaggregation_mode": "role",
        "disable_cuda_graph": "is_eager",
    },
    "vllm": {
        "model": "model",
        "tensor_parallel_size": "tp",
        "pipeline_parallel_size": "pp",
        "data_parallel_size": "dp",
        "decode_context_parallel_size": "dcp",
        "gpu_memory_utilization": "fraction",
        "max_num_seqs": "max_running_requests",
        "max_model_len": "context",
        "max_seq_len": "context",
        "kv_cache_dtype": "kv_dtype",
        "enable_expert_parallel": "is_expert_parallel",
        "speculative_config": "speculation",
        "enforce_eager": "is_eager",
    },
}
ARGUMENT_PATTERNS = {
    engine: re.compile(rf"""\b({"|".join(names)})['"]?\s*[=:]\s*('[^']*'|"[^"]*"|[^\s,)}}\]]+)""")
    for engine, names in ARGUMENTS.items()
}
