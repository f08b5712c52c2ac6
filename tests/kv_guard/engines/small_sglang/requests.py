"""Requests, and how they end."""

from array import array
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tests.kv_guard.engines.small_sglang.places import at, srt


@at("managers.schedule_batch", "managers.scheduler_components.batch_result_processor")
class FINISH_ABORT:  # noqa: N801  SGLang's name
    def __init__(self, message=None, status_code=None, err_type=None):
        self.message, self.status_code, self.err_type = message or "Aborted", status_code, err_type


@at("managers.schedule_batch")
@dataclass
class ReqKvInfo:
    req_pool_idx: int | None = None
    cache_protected_len: int = 0
    kv_committed_len: int = 0
    kv_allocated_len: int = 0
    retraction_backup: Any = None

    @property
    def holds_kv(self):
        return self.req_pool_idx is not None

    def mark_kv_released(self):
        self.kv_allocated_len = 0


@at("managers.schedule_batch")
class Req:
    def __init__(
        self,
        rid,
        origin_input_text,
        origin_input_ids,
        sampling_params,
        *,
        extra_key=None,
        cache_salt=None,
        bootstrap_host=None,
        bootstrap_room=None,
        **others,
    ):
        self.bootstrap_host, self.bootstrap_room = bootstrap_host, bootstrap_room
        self.rid, self.origin_input_ids, self.sampling_params = rid, origin_input_ids, sampling_params
        self.extra_key, self.cache_salt = extra_key, cache_salt
        self.output_ids, self.full_untruncated_fill_ids = array("q"), array("q")
        self.kv, self.lock, self.last_node, self.prefix_len, self.extend_end = ReqKvInfo(), None, None, 0, 0
        self.finished_reason = self.to_finish = self.discard_output_reason = None
        self.inflight_middle_chunks, self.is_retracted, self.skip_radix_cache_insert = 0, False, False

    @property
    def extend_len(self):
        return self.extend_end - self.prefix_len

    @property
    def seqlen(self):
        return len(self.origin_input_ids) + len(self.output_ids)

    def finished(self):
        return self.finished_reason is not None

    def refresh_fill_ids(self):
        self.full_untruncated_fill_ids = self.origin_input_ids + self.output_ids

    def init_next_round_input(self, tree_cache=None, cow_mamba=None):
        self.refresh_fill_ids()
        tokens: Any = self.full_untruncated_fill_ids
        if tree_cache is not None:
            match = srt("mem_cache.common").match_kv_cache
            match(self, tree_cache, tokens, max_prefix_len=len(tokens) - 1)
            self.kv.cache_protected_len = self.prefix_len

    def update_finish_state(self, new_accepted_len=1):
        if self.finished():
            return
        if self.to_finish:
            self.finished_reason, self.to_finish = self.to_finish, None
        elif len(self.output_ids) >= self.sampling_params.max_new_tokens:
            self.finished_reason = "length"

    def reset_for_retract(self):
        self.prefix_len, self.last_node, self.lock, self.is_retracted = 0, None, None, True
        self.kv.cache_protected_len = 0


@at("sampling.sampling_params")
class SamplingParams:
    def __init__(self, *, max_new_tokens):
        self.max_new_tokens = max_new_tokens


@at("layers.dp_attention")
def get_dp_tp_group():
    return SimpleNamespace(cpu_group=None)


@at("beam_search.coordinator")
class BeamCoordinator:
    def __init__(self, req_to_token_pool):
        self.req_to_token_pool = req_to_token_pool

    def validate_and_init(self, req, recv_req):
        return None
