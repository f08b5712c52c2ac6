"""The scheduler, the pool and the requests of a real vLLM, in the miniature's loop and with its workers.

QUANTKIT_VLLM names folders as PYTHONPATH does: that of the wheel's content, and those of what it imports. Only what is
not compiled is loaded. Configurations are its own where a scheduler asks much of them, and made by hand elsewhere.
"""

import os
import sys
import warnings
from types import SimpleNamespace

sys.path[:0] = os.environ["QUANTKIT_VLLM"].split(os.pathsep)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.worker_base  # noqa: F401
    from vllm.config.cache import CacheConfig
    from vllm.config.observability import ObservabilityConfig
    from vllm.config.parallel import ParallelConfig
    from vllm.config.scheduler import SchedulerConfig
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: F401
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
    from vllm.v1.request import Request

from tests.kv_guard.engines.small_vllm.harness import PAGE_SIZE, Engine  # noqa: E402

init_none_hash(sha256)
register_all_kvcache_specs(None)


class WheelEngine(Engine):
    def configs(
        self,
        *,
        depth=1,
        v2=True,
        windows=(None,),
        more=0,
        num_blocks=24,
        max_seqs=4,
        chunk=7,
        caching=True,
        max_len=64,
        num_drafts=0,
    ):
        scheduler_config = SchedulerConfig(
            max_num_seqs=max_seqs,
            max_num_batched_tokens=32,
            max_model_len=max_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=depth > 1,
        )
        scheduler_config.long_prefill_token_threshold = chunk
        cache_config = CacheConfig(block_size=PAGE_SIZE, enable_prefix_caching=caching)
        cache_config.num_gpu_blocks = num_blocks
        model_config = SimpleNamespace(
            model="tiny",
            revision=None,
            max_model_len=max_len,
            runner_type="generate",
            is_diffusion=False,
            uses_mrope=False,
            is_encoder_decoder=False,
            supports_multimodal_inputs=False,
            return_sampling_mask=False,
        )
        return SimpleNamespace(
            scheduler_config=scheduler_config,
            cache_config=cache_config,
            parallel_config=ParallelConfig(),
            observability_config=ObservabilityConfig(),
            model_config=model_config,
            lora_config=None,
            kv_events_config=None,
            kv_transfer_config=None,
            ec_transfer_config=None,
            speculative_config=None,
            ec_manager_config=SimpleNamespace(get_encoder_cache_manager_obj=lambda: None),
            aux_output_config=SimpleNamespace(enabled=False),
            is_mm_encoder_only=False,
            num_speculative_tokens=num_drafts,
            num_lookahead_tokens=num_drafts,
            num_prefill_lookahead_tokens=0,
            num_hash_lookahead_tokens=0,
            max_in_flight_tokens=32 * depth,
            num_drafts=num_drafts,
            max_concurrent_batches=depth,
            use_v2_model_runner=v2,
        ), KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer{number}"], _spec_of(window, more)) for number, window in enumerate(windows)
            ],
        )

    def make_scheduler(self, vllm_config, kv_cache_config):
        return vllm_config.scheduler_config.get_scheduler_cls()(
            vllm_config=vllm_config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=SimpleNamespace(
                accept_tokens=lambda *_: True, validate_tokens=lambda _, tokens: tokens
            ),
            block_size=PAGE_SIZE,
        )

    def make_request(self, name, prompt, max_tokens):
        caching = self.vllm_config.cache_config.enable_prefix_caching
        return Request(
            name,
            list(prompt),
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            None,
            block_hasher=get_request_block_hasher(PAGE_SIZE, sha256) if caching else None,
        )


def _spec_of(window, more):
    parts = {"block_size": PAGE_SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}
    if window is None:
        return FullAttentionSpec(**parts)
    return SlidingWindowSpec(**parts, sliding_window=window, extra_retained_tokens=more)
