"""The serving loop on the wheel's own allocators, rows, prefix cache, requests and result processing.

Of the miniature remain the scheduler's loop, the model's runner and the function that builds the cache, whose modules
cannot be imported without a GPU's libraries. Their parameters are compared with the wheel's.
"""

import sys
from types import SimpleNamespace

import torch

from tests.kv_guard.engines.serving_loop import VOCABULARY, Serving
from tests.kv_guard.engines.small_sglang import places

MINIATURE = ("managers.scheduler", "mem_cache.kv_cache_builder", "model_executor.model_runner")


def install(monkeypatch):
    """The miniature's modules among the wheel's."""
    for name, module in places.modules(MINIATURE).items():
        monkeypatch.setitem(sys.modules, name, module)
    places.srt("managers.scheduler").checkpoint_kv_cache = places.srt("mem_cache.common").checkpoint_kv_cache


class _Idle:
    """Metrics and workers, of which nothing is wanted here."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class WheelServing(Serving):
    core = "python"

    def make_cache(self, disable):
        components = places.srt("mem_cache.unified_cache.components").ComponentType
        params = places.srt("mem_cache.cache_init_params").CacheInitParams(
            disable=disable,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.page_size,
            is_eagle=self.speculation.is_eagle(),
            tree_components=(components.FULL,),
            tree_core_backend=self.core,
        )
        return places.srt("mem_cache.unified_radix_cache").UnifiedRadixCache(params)

    def make_processor(self):
        reporter = _Idle()
        reporter.num_generated_tokens = reporter.forward_ct_decode = 0
        modes = places.srt("disaggregation.utils").DisaggregationMode
        return places.srt("managers.scheduler_components.batch_result_processor").SchedulerBatchResultProcessor(
            is_generation=True,
            disaggregation_mode=modes.NULL,
            enable_overlap=self.overlap,
            enable_overlap_mlx=False,
            model_config=SimpleNamespace(self_opened_think_start_ids=None, think_end_ids=None),
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.tree,
            hisparse_coordinator=None,
            req_to_token_pool=self.rows,
            decode_offload_manager=None,
            metrics_collector=None,
            metrics_reporter=reporter,
            draft_worker=None,
            model_worker=_Idle(),
            logprob_result_processor=None,
            output_streamer=self,
            beam_coordinator=SimpleNamespace(commit_decode=lambda batch: set()),
            abort_request=None,
        )

    def make_queues(self):
        self.scheduler.enable_hisparse = self.scheduler.enable_decode_hicache = False
        self.scheduler.kv_checksum_computer = None
        self.scheduler.tp_worker = SimpleNamespace(is_hybrid_swa=False)
        prealloc, transfers = super().make_queues()
        prealloc.token_to_kv_pool = self.kv_pool
        transfers.spec_algorithm = self.speculation
        return prealloc, transfers

    def commit(self, transfers, req, token, room=None):
        sent = [None] * 14
        sent[0], sent[1], sent[-1] = (
            torch.tensor([token]),
            torch.zeros(8, dtype=torch.int64),
            torch.tensor([req.bootstrap_room if room is None else room]),
        )
        transfers.metadata_buffers = SimpleNamespace(get_buf=lambda index: tuple(sent))
        receiver = SimpleNamespace(clear=lambda: None)
        decode_req = SimpleNamespace(
            req=req, metadata_buffer_index=0, kv_receiver=receiver, prefix_match=None, is_rebootstrap=False
        )
        transfers._commit_transfer_to_req(decode_req)
        return decode_req

    def make_request(self, rid, tokens, max_new, **names):
        params = places.srt("sampling.sampling_params").SamplingParams(max_new_tokens=max_new, ignore_eos=True)
        params.normalize(None)
        return places.srt("managers.schedule_batch").Req(rid, "", tokens, params, vocab_size=VOCABULARY, **names)

    def publish(self):
        """The config that SGLang's functions read; returns what takes it back."""
        context = places.srt("runtime_context").get_context()
        algorithm = "EAGLE" if self.speculation.is_eagle() else None
        override = context.override_server_args(
            attention_backend="torch_native",
            speculative_algorithm=algorithm,
            page_size=self.page_size,
            disaggregation_mode=self.options.disaggregation_mode,
        )
        override.install()
        alone = SimpleNamespace(cpu_group=None, world_size=1)
        places.srt("runtime_context").get_parallel().override_permanently(tp_group=alone, attn_dcp_rank=0)
        return override
