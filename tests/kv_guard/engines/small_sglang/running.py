"""The model's runner, the scheduler's step, and what becomes of its result."""

import dataclasses
from enum import IntEnum, auto
from typing import Any

from tests.kv_guard.engines.small_sglang.places import at, srt


@at("model_executor.forward_batch_info")
class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()

    def is_extend(self):
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.TARGET_VERIFY)

    def is_decode(self):
        return self is ForwardMode.DECODE

    def is_idle(self):
        return self is ForwardMode.IDLE

    def is_target_verify(self):
        return self is ForwardMode.TARGET_VERIFY


@at("model_executor.model_runner")
class ModelRunner:
    """``compute`` stands for the model."""

    def __init__(self, *, pools, options, compute, is_draft_worker=False, others):
        self.req_to_token_pool, self.token_to_kv_pool_allocator, self.token_to_kv_pool = pools
        self.server_args, self.compute, self.is_draft_worker, self.gpu_id = options, compute, is_draft_worker, 0
        self.model_config, self.spec_algorithm, self.is_hybrid_swa = *others, False

    def _init_post_memory_pool_components(self):
        self.graph_shared_output = None

    def forward(
        self,
        forward_batch,
        skip_attn_backend_init=None,
        pp_proxy_tensors=None,
        reinit_attn_backend=False,
        split_forward_count=1,
    ):
        return self.compute(forward_batch)


@at("managers.utils")
@dataclasses.dataclass
class GenerationBatchResult:
    next_token_ids: Any = None
    accept_lens: Any = None
    speculative_output_stride: Any = None


@at("managers.scheduler")
class Scheduler:
    def __init__(self, runner, tree_cache, processor):
        self.runner, self.tree_cache, self.batch_result_processor = runner, tree_cache, processor
        self.chunked_req = self._pending_chunked_abort_req = None

    def run_batch(self, batch, pp_proxy_tensors=None):
        return srt("managers.utils").GenerationBatchResult(next_token_ids=self.runner.forward(batch.forward_batch()))

    def process_batch_result(self, batch, result):
        if batch.forward_mode.is_decode():
            self.batch_result_processor.process_batch_result_decode(batch, result)
        else:
            self.batch_result_processor.process_batch_result_prefill(batch, result)


@at("managers.scheduler_components.batch_result_processor")
@dataclasses.dataclass(kw_only=True, slots=True, frozen=True)
class SchedulerBatchResultProcessor:
    enable_overlap: bool
    token_to_kv_pool_allocator: Any
    tree_cache: Any
    output_streamer: Any

    def process_batch_result_prefill(self, batch, result):
        common = srt("managers.scheduler_components.batch_result_processor")
        self.token_to_kv_pool_allocator.free_group_begin()
        skipped = None
        for req, token in zip(batch.reqs, result.next_token_ids.tolist(), strict=True):
            if req.finished() or req.is_retracted:
                continue
            if req.inflight_middle_chunks > 0:
                req.inflight_middle_chunks, skipped = req.inflight_middle_chunks - 1, req
            elif req.discard_output_reason is not None:
                req.to_finish = req.discard_output_reason
                req.update_finish_state(0)
                common.release_kv_cache(req, self.tree_cache, checkpoint=False)
            else:
                req.output_ids.append(token)
                req.update_finish_state()
                if req.finished():
                    common.release_kv_cache(req, self.tree_cache, checkpoint=True)
                elif req not in (batch.decoding_reqs or ()):
                    common.checkpoint_kv_cache(req, self.tree_cache)
        self.token_to_kv_pool_allocator.free_group_end()
        self.output_streamer.stream_output(batch.reqs, False, skipped)

    def process_batch_result_decode(self, batch, result):
        common = srt("managers.scheduler_components.batch_result_processor")
        self.token_to_kv_pool_allocator.free_group_begin()
        stride = result.speculative_output_stride
        for req, tokens in zip(batch.reqs, result.next_token_ids.reshape(len(batch.reqs), -1).tolist(), strict=True):
            if stride is not None and not req.finished():
                req.kv.kv_committed_len += len(tokens)
            if self.enable_overlap and (req.finished() or req.is_retracted):
                continue
            req.output_ids.extend(tokens)
            req.update_finish_state(len(tokens))
            if req.finished():
                common.release_kv_cache(req, self.tree_cache, checkpoint=True)
        self.output_streamer.stream_output(batch.reqs, False)
        self.token_to_kv_pool_allocator.free_group_end()

    def _handle_sampling_mask_abort(self, req):
        srt("managers.scheduler_components.batch_result_processor").release_kv_cache(
            req, self.tree_cache, checkpoint=False
        )
