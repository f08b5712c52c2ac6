"""What both pools of a pair must say alike. Nothing of it is written anywhere else.

A decode server compares page size and KV dtype with the prefill server and refuses to bootstrap where they differ
(`disaggregation/common/conn.py`). It does not compare how rows are laid out, nor what the draft is.
"""

from collections.abc import Iterator, Mapping

from quantkit.errors import UsageError
from quantkit.memory.gpus import Gpu
from quantkit.memory.kv_format import KvDtype
from quantkit.memory.rules import RULES
from quantkit.memory.sglang import DRAFT_TOKENS
from quantkit.serving.flags import Flag, flag
from quantkit.serving.models import chooses_itself, parsers_of
from quantkit.serving.pool import Pool
from quantkit.serving.request import ServeRequest

TRANSFER_BACKEND = "mooncake"
# sparse attention: (prefill, decode) by kind of GPU and KV dtype. SGLang's own choice, but for FP8 prefill on Hopper
_DSA_BACKENDS: Mapping[tuple[str, KvDtype], tuple[str, str]] = {
    ("sm90", KvDtype.FP8): ("flashmla_sparse_q8", "flashmla_kv"),
    ("sm90", KvDtype.BF16): ("flashmla_sparse", "fa3"),
    ("sm10x", KvDtype.FP8): ("trtllm", "trtllm"),
    ("sm10x", KvDtype.BF16): ("flashmla_sparse", "trtllm"),
    ("sm120", KvDtype.FP8): ("flashinfer_sparse_mla", "flashinfer_sparse_mla"),
    ("amd", KvDtype.FP8): ("triton", "triton"),
    ("amd", KvDtype.BF16): ("triton", "triton"),
}
_WHY_Q8 = "prefill attention in FP8; the default, flashmla_kv, computes it in BF16"


def agreed_flags(request: ServeRequest, pools: tuple[Pool, ...], *, has_mtp: bool) -> tuple[Flag, ...]:
    """For every SGLang server of the deployment; ``pools`` ends with that of OUTPUT.

    Raises UsageError where the pools' memory plans have different rows or pages.
    """
    output = pools[-1]
    for pool in pools:
        if (pool.plan.kv_format.dtype, pool.plan.kv_format.layout, pool.page_tokens) != (
            output.plan.kv_format.dtype,
            output.plan.kv_format.layout,
            output.page_tokens,
        ):
            raise UsageError("the pools would lay KV rows out differently", remedy="give --kv-dtype fp8 or bf16")
    flags = (*_cache_flags(request, output), *_speculation(has_mtp), *_formats(output))
    if len(pools) == 1:
        return tuple(flags)
    return tuple(
        flag(one.name, *one.values, why=one.why, is_agreed=True) for one in (*flags, *_pair_flags(request, output))
    )


def _cache_flags(request: ServeRequest, output: Pool) -> Iterator[Flag]:
    dtype = output.plan.kv_format.dtype
    words = RULES[request.engine].kv_dtype_words[dtype]
    yield flag("--kv-cache-dtype", words, why=f"{output.plan.kv_format.layout} rows, as the memory plan counts them")
    yield flag("--page-size", output.page_tokens, why="tokens of a KV page, what SGLang takes here itself")
    backends = _DSA_BACKENDS.get((_kind(request.gpu), dtype))
    if output.is_sparse and backends is not None:
        why = _WHY_Q8 if backends[0] == "flashmla_sparse_q8" else "what SGLang takes here itself"
        yield flag("--dsa-prefill-backend", backends[0], why=why)
        yield flag("--dsa-decode-backend", backends[1], why="both together decide how rows are laid out")


def _kind(gpu: Gpu) -> str:
    if gpu.architecture.is_amd:
        return "amd"
    return "sm10x" if gpu.architecture.is_datacenter_blackwell else gpu.architecture.value


def _speculation(has_mtp: bool) -> Iterator[Flag]:
    if not has_mtp:
        return
    steps = DRAFT_TOKENS - 1
    yield flag("--speculative-algorithm", "EAGLE", why="the checkpoint's own MTP layer drafts")
    yield flag("--speculative-num-steps", steps, why="tokens drafted one after another")
    yield flag("--speculative-eagle-topk", 1, why="a chain and no tree")
    yield flag("--speculative-num-draft-tokens", DRAFT_TOKENS, why="those and the one before them")


def _formats(output: Pool) -> Iterator[Flag]:
    served = output.served
    model_type = str(served.config.get("model_type", ""))
    parsers = parsers_of(model_type, served.names)
    if parsers is not None:
        yield flag("--tool-call-parser", parsers.tool, why=f"tool calls as {model_type} writes them")
        yield flag("--reasoning-parser", parsers.reasoning, why="thoughts apart from the answer")
    elif chooses_itself(model_type):
        why = f"no name tells which version of {model_type} this is: SGLang looks at the chat template"
        yield flag("--tool-call-parser", "auto", why=why)
        yield flag("--reasoning-parser", "auto", why=why)
    if served.has_remote_code:
        yield flag("--trust-remote-code", why="config.json has an auto_map: this runs code of the checkpoint, read it")


def _pair_flags(request: ServeRequest, output: Pool) -> Iterator[Flag]:
    yield flag("--served-model-name", output.served.model.name, why="one name, whichever pool is asked")
    yield flag("--disaggregation-transfer-backend", TRANSFER_BACKEND, why="carries KV from prefill to decode")
    if request.network.ib_device is not None:
        device = request.network.ib_device
        yield flag("--disaggregation-ib-device", device, why="the devices that it uses")
