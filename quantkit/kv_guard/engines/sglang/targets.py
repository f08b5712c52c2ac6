"""What the guard hooks into in SGLang 0.5.23, and what it calls of it, as data."""

from dataclasses import dataclass
from enum import StrEnum

from quantkit.kv_guard.engines.targets import Supported, Target

SUPPORTED = Supported("SGLang", ("0.5.23",))
ROOT = "sglang.srt."


class Kind(StrEnum):
    """How SGLang calls a hook; ``CALLED`` is no hook but a function that the guard itself calls."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    CALLED = "called"


@dataclass(frozen=True, slots=True, kw_only=True)
class HookTarget(Target):
    """With the hook: its file here, and the method of that file's class."""

    kind: Kind
    hook: str


def _target(kind: Kind, name: str, parameters: str, hook: str, purpose: str) -> HookTarget:
    return HookTarget(name=ROOT + name, kind=kind, parameters=parameters, hook=hook, purpose=purpose)


def _called(name: str, parameters: str, purpose: str) -> HookTarget:
    return _target(Kind.CALLED, name, parameters, "", purpose)


_PAGED = "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator."
_TOKEN = "mem_cache.allocator.token.TokenToKVPoolAllocator."
_ALLOC = "mem_cache.allocation."
_ROWS = "mem_cache.memory_pool.ReqToTokenPool."
_DECODE_ROWS = "disaggregation.decode.DecodeReqToTokenPool."
_TREE = "mem_cache.unified_radix_cache.UnifiedRadixCache."
_RUNNER = "model_executor.model_runner.ModelRunner."
_SCHEDULER = "managers.scheduler.Scheduler."
_RESULTS = "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
_EXTEND = "self, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages="
_DECODE = "self, seq_lens, seq_lens_cpu, last_loc"
_RUN = "self, batch, pp_proxy_tensors="
_BUILD = (
    "*, server_args, model_config, tp_worker, page_size, spec_algorithm, enable_metrics, enable_kv_cache_events, "
    "enable_hierarchical_cache, hicache_draft_plan=, dynamo_kv_event_format=, kv_event_lora_names=, draft_swa_window="
)
_SPECULATE = (
    "tree_cache, req_to_token_pool, *, reqs, req_pool_indices, cur_kv_lens, cur_kv_lens_cpu, nxt_kv_lens, "
    "nxt_kv_lens_cpu, num_needed_tokens, batch="
)
_BACKUP = "req, tree_cache, req_to_token_pool, token_to_kv_pool_allocator, backend"
_FORWARD = "self, forward_batch, skip_attn_backend_init=, pp_proxy_tensors=, reinit_attn_backend=, split_forward_count="

TARGETS: tuple[HookTarget, ...] = (
    # the pool
    _target(
        Kind.AFTER,
        _RUNNER + "_init_post_memory_pool_components",
        "self",
        "startup.pools_made",
        "pools exist, graphs are not captured yet: attach",
    ),
    _target(
        Kind.AFTER,
        "mem_cache.allocator.base.BaseTokenToKVPoolAllocator.resize",
        "self, config",
        "startup.resized",
        "attach anew",
    ),
    _target(
        Kind.AFTER,
        "mem_cache.kv_cache_builder.build_kv_cache",
        _BUILD,
        "startup.tree_made",
        "is the prefix cache one that is known?",
    ),
    # slots
    _target(Kind.AFTER, _PAGED + "alloc", "self, need_size", "allocation.handed_out", "slots that are handed out"),
    _target(Kind.AFTER, _PAGED + "alloc_extend", _EXTEND, "allocation.handed_out", "slots that are handed out"),
    _target(Kind.AFTER, _PAGED + "alloc_decode", _DECODE, "allocation.handed_out", "slots that are handed out"),
    _target(
        Kind.BEFORE, _PAGED + "_release_page_ids", "self, *page_ids", "allocation.release_pages", "pages that are free"
    ),
    _target(Kind.AFTER, _PAGED + "clear", "self", "allocation.cleared", "every page is free"),
    _target(Kind.AFTER, _TOKEN + "alloc", "self, need_size", "allocation.handed_out", "slots that are handed out"),
    _target(
        Kind.BEFORE, _TOKEN + "free", "self, free_index", "allocation.free_slots", "slots that are free, or in a group"
    ),
    _target(Kind.AFTER, _TOKEN + "clear", "self", "allocation.cleared", "every slot is free"),
    # rows
    _target(Kind.AROUND, _ROWS + "alloc", "self, reqs", "allocation.alloc_rows", "which requests begin in which rows"),
    _target(Kind.BEFORE, _ROWS + "free_rows", "self, indices", "allocation.free_rows", "rows that end"),
    _target(Kind.AFTER, _ROWS + "clear", "self", "allocation.clear_rows", "every row ends"),
    _target(
        Kind.AROUND,
        _ALLOC + "alloc_for_extend",
        "batch",
        "allocation.extend",
        "new pages, and cached ones that are read",
    ),
    _target(
        Kind.AROUND,
        _ALLOC + "alloc_for_decode",
        "batch, token_per_req",
        "allocation.decode",
        "new pages of a decode step",
    ),
    _target(
        Kind.AROUND,
        _ALLOC + "alloc_for_spec_decode",
        _SPECULATE,
        "allocation.speculate",
        "pages that speculation reserves",
    ),
    _target(
        Kind.AROUND,
        "beam_search.coordinator.BeamCoordinator.validate_and_init",
        "self, req, recv_req",
        "startup.refuse_beams",
        "beams have rows of no request",
    ),
    # disaggregated serving
    _target(
        Kind.AROUND, _DECODE_ROWS + "alloc", "self, reqs", "allocation.alloc_rows", "which requests begin in which rows"
    ),
    _target(Kind.BEFORE, _DECODE_ROWS + "free", "self, req", "allocation.free_row", "rows that end"),
    _target(Kind.AFTER, _DECODE_ROWS + "clear", "self", "allocation.clear_rows", "every row ends"),
    _target(
        Kind.AFTER,
        "mem_cache.memory_pool.MLATokenToKVPool.get_contiguous_buf_infos",
        "self",
        "transfers.buffers",
        "tags travel beside the pages",
    ),
    _target(
        Kind.BEFORE,
        "disaggregation.common.conn.CommonKVManager.get_mla_kv_ptrs_with_pp",
        "self, src_kv_ptrs, dst_kv_ptrs, state_type=",
        "transfers.paired",
        "does the other server take tags?",
    ),
    _target(
        Kind.AROUND,
        "disaggregation.decode.DecodePreallocQueue._pre_alloc",
        "self, req, prefix_indices=, prefix_len=, total_prefix_len=",
        "transfers.reserve",
        "pages that a transfer will fill",
    ),
    _target(
        Kind.AFTER,
        "disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req",
        "self, decode_req",
        "transfers.committed",
        "a transfer is said to be complete",
    ),
    _target(
        Kind.BEFORE,
        "disaggregation.decode.DecodeTransferQueue._release_request",
        "self, decode_req",
        "transfers.given_up",
        "a transfer's pages are given back without having been read",
    ),
    _target(
        Kind.BEFORE,
        "mem_cache.common.backup_kv_cache",
        _BACKUP,
        "transfers.backed_up",
        "pages that are read beside a step",
    ),
    _target(
        Kind.AFTER,
        "mem_cache.common.restore_kv_cache",
        _BACKUP,
        "transfers.restored",
        "pages that no transfer will fill",
    ),
    # prefixes
    _target(
        Kind.AROUND,
        _TREE + "checkpoint_into_tree",
        "self, req, *, up_to, **kwargs",
        "caching.checkpoint",
        "whose pages are inserted",
    ),
    _target(Kind.AFTER, _TREE + "insert", "self, params", "caching.insert", "which pages the tree takes"),
    # steps
    _target(Kind.AROUND, _SCHEDULER + "run_batch", _RUN, "steps.run_batch", "which batch a forward is of"),
    _target(Kind.AROUND, _RUNNER + "forward", _FORWARD, "steps.forward", "before and after a step, on its stream"),
    _target(
        Kind.BEFORE,
        _SCHEDULER + "process_batch_result",
        "self, batch, result",
        "steps.process_batch_result",
        "the verdict, ahead of the tokens",
    ),
    _target(
        Kind.AROUND,
        _RESULTS + "process_batch_result_decode",
        "self, batch, result",
        "aborts.decode",
        "whose tokens are withheld",
    ),
    _target(
        Kind.AROUND,
        "mem_cache.common.release_kv_cache",
        "req, tree_cache, *, checkpoint",
        "aborts.release",
        "an ended request gives back what is its own, and caches nothing",
    ),
    # what is called
    _called(_RESULTS + "_handle_sampling_mask_abort", "self, req", "end a request without its token"),
    _called("managers.schedule_batch.Req.update_finish_state", "self, new_accepted_len=", "end a request"),
    _called("managers.schedule_batch.FINISH_ABORT.__init__", "self, message=, status_code=, err_type=", "say why"),
    _called("disaggregation.utils._is_fake_transfer", "req", "is nothing sent?"),
    _called(
        "disaggregation.common.conn.CommonKVManager.is_abort_release_safe",
        "self, bootstrap_room, required_acks",
        "has each server said that it writes no more?",
    ),
    _called("layers.dp_attention.get_dp_tp_group", "", "ranks that run the same batches"),
)
