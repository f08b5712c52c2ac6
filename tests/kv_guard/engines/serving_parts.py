"""Of a server in small: its options, and its batches."""

from types import SimpleNamespace

import torch

from quantkit.kv_guard.engines.sglang.supported import OPTIONS, TRANSFER_OPTIONS

UNGUARDED = {
    **OPTIONS,
    **TRANSFER_OPTIONS,
    "tp_size": 1,
    "dp_size": 1,
    "disable_radix_cache": False,
    "disaggregation_mode": "null",
    "disaggregation_transfer_backend": "mooncake",
    "disaggregation_decode_retraction_backup": None,
    "enable_lora": None,
}  # as SGLang has them by itself, which test_sglang_wheel.py compares


class Batch:
    """What the functions ask of a `ScheduleBatch`."""

    return_logprob = return_hidden_states = False
    hisparse_coordinator = decoding_reqs = prefill_stats = mamba_track_mask_cpu = None
    has_grammar = False
    return_hidden_states_mode, spec_info = 0, None
    device = "cpu"

    def __init__(self, serving, reqs, mode):
        self.serving, self.reqs, self.forward_mode = serving, list(reqs), mode
        self.tree_cache, self.req_to_token_pool = serving.tree, serving.rows
        self.token_to_kv_pool_allocator = serving.allocator
        self.model_config = SimpleNamespace(is_encoder_decoder=False)
        self.spec_algorithm = serving.speculation

    def batch_size(self):
        return len(self.reqs)

    def is_dllm(self):
        return False

    def maybe_evict_swa(self):
        pass

    def rows(self):
        self.req_pool_indices_cpu = torch.tensor([req.kv.req_pool_idx for req in self.reqs])
        self.req_pool_indices = self.req_pool_indices_cpu.clone()

    def forward_batch(self):
        return SimpleNamespace(
            forward_mode=self.verify_mode or self.forward_mode,
            batch_size=len(self.reqs),
            req_pool_indices=self.req_pool_indices,
            seq_lens=self.seq_lens,
            out_cache_loc=self.out_cache_loc,
            positions=self.positions,
            extend_seq_lens=torch.tensor(self.extend_lens),
            input_ids=self.input_ids,
        )

    verify_mode = None
    extend_lens = prefix_lens = ()
