"""What of a server the guard knows: classes of pools by name, options by value. Everything else is refused at start.

A hook patches the class that it names. A subclass with methods of its own, or a feature that hands out pages by another
path, would go on unguarded or raise false alarms, so that both are refused rather than tried.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.kv_guard.engines.sglang.targets import ROOT
from quantkit.kv_guard.tracker import KvGuardError

REPORT = "report which option was used, and serve without it"
ALLOCATORS = (
    "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator",
    "mem_cache.allocator.token.TokenToKVPoolAllocator",
)
ROW_POOLS = ("mem_cache.memory_pool.ReqToTokenPool", "disaggregation.decode.DecodeReqToTokenPool")
TREES = ("mem_cache.unified_radix_cache.UnifiedRadixCache",)
SPECULATION = ("NONE", "EAGLE", "EAGLE3")  # MTP is EAGLE here

OPTIONS: Mapping[str, object] = {
    "pp_size": 1,  # ranks would have to agree on whom to end
    "attn_cp_size": 1,
    "dcp_size": 1,
    "enable_kv_cache_sharding": False,
    "enable_unified_memory": False,  # pages are virtual
    "enable_hisparse": False,
    "enable_hierarchical_cache": False,  # pages go to the host and come back by paths of their own
    "enable_unified_cache_external_linker": False,
    "enable_lmcache": False,
    "enable_flexkv": False,
    "radix_cache_backend": None,
    "enable_streaming_session": False,  # rows outlive their requests
    "enable_session_radix_cache": False,  # sessions refer to what the cache has
    "enable_encoder_swa_bounded_replay": False,  # a forward before the forward
    "enable_pdmux": False,  # a forward in parts
    "dllm_algorithm": None,  # rewrites pages that are filled
    "enable_mis": False,  # a token's position is not its place
    "is_embedding": False,  # what is sent is no token
    "decoupled_spec_role": "null",  # half of a model in each of two servers
    "enable_pd_role_switch": False,
}
# a transfer has one list of buffers, which these classes fill with one entry a layer; others have keys and values apart
SENT_POOLS = ("mem_cache.memory_pool.MLATokenToKVPool", "mem_cache.memory_pool.DSATokenToKVPool")
TRANSFERS = ("mooncake", "nixl")
TRANSFER_OPTIONS: Mapping[str, object] = {
    "disaggregation_enable_kv_checksum": False,  # it would sum up the tags, which are taken when they have come
    "disaggregation_decode_enable_offload_kvcache": False,
    "disaggregation_decode_host_receive_threshold": 1.0,
}


def check_class(found: object, known: tuple[str, ...], what: str) -> None:
    """Raises KvGuardError for an object of another class, a subclass included."""
    path = f"{type(found).__module__}.{type(found).__qualname__}"
    if path not in {ROOT + name for name in known}:
        raise KvGuardError(f"the {what} {path} is not known", remedy=f"known are {', '.join(known)}")


def check_options(options: Any) -> None:
    """``options`` are SGLang's server arguments. Raises KvGuardError for the first that is not covered."""
    for name, value in OPTIONS.items():
        _check_option(options, name, (value,))


def check_transfers(runner: Any) -> None:
    """Raises KvGuardError for a prefill or decode server whose transfers are not covered."""
    options = runner.server_args
    if options.disaggregation_mode == "null":
        return
    check_class(runner.token_to_kv_pool, SENT_POOLS, "KV pool of a transfer")
    for name, value in TRANSFER_OPTIONS.items():
        _check_option(options, name, (value,))
    _check_option(options, "disaggregation_transfer_backend", TRANSFERS)
    _check_option(options, "disaggregation_decode_retraction_backup", (None, "cpu_tensor", "none"))
    _check_option(options, "enable_lora", (None, False))  # the names of adapters differ between servers
    if runner.token_to_kv_pool.enable_custom_mem_pool:
        raise KvGuardError("transfers within NVLink", remedy="unset SGLANG_MOONCAKE_CUSTOM_MEM_POOL, or the guard")


def check_secret(runner: Any, secret: str | None) -> None:
    """Raises KvGuardError where owners go to another server, or come from one, and each would have a key of its own."""
    if runner.server_args.disaggregation_mode != "null" and secret is None:
        raise KvGuardError(
            "a prefill or decode server without a `secret`, under which both know each other's owners",
            remedy="put the same into the settings file of both; `openssl rand -hex 32` prints one",
        )


def _check_option(options: Any, name: str, covered: Sequence[object]) -> None:
    given = getattr(options, name)
    if given not in covered:
        raise KvGuardError(
            f"--{name.replace('_', '-')} is {given!r}, and the guard covers {', '.join(map(repr, covered))}",
            remedy="serve without this option, or without the guard",
        )


def check_model(runner: Any) -> None:
    """Raises KvGuardError for models that keep other pages than those of tokens, and for other speculation."""
    if runner.model_config.is_encoder_decoder:
        raise KvGuardError("the model's encoder has pages of its own", remedy="serve it without the guard")
    if runner.is_hybrid_swa:
        raise KvGuardError(
            "the model's sliding windows have a pool of their own, and the guard covers one",
            remedy="serve with --disable-hybrid-swa-memory, or without the guard",
        )
    if runner.spec_algorithm.name not in SPECULATION:
        raise KvGuardError(
            f"--speculative-algorithm is {runner.spec_algorithm.name}, and the guard covers {', '.join(SPECULATION)}",
            remedy="serve without this option, or without the guard",
        )


def check_unused(allocator: Any, rows: Any) -> None:
    """Raises KvGuardError where pages or rows are already handed out, of which nobody knows whose they are."""
    num_used = allocator.size // allocator.page_size * allocator.page_size - allocator.available_size()
    num_rows = len(rows.req_to_token) - 1 - len(rows.free_slots)  # row 0 is padding's
    if num_used or num_rows:
        raise KvGuardError(
            f"the pool is in use: {num_used} tokens, {num_rows} rows",
            remedy="attach the guard before the first request",
        )
