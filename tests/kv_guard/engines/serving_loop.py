"""A server in small around SGLang's functions, real or of the miniature: admits, runs, processes, with a model whose
answers tell whether it read its own pages.

The cache holds what was stored; the next token is a weighed sum of what a request's row reads. `expected` says from the
request's tokens alone what it must be.
"""

from array import array
from types import SimpleNamespace

import torch

from tests.kv_guard.engines.serving_parts import UNGUARDED, Batch
from tests.kv_guard.engines.small_sglang.places import srt

VOCABULARY = 997


def expected(tokens):
    """The token behind these."""
    return sum(token * (place % 31 + 1) for place, token in enumerate(tokens)) % VOCABULARY


class Serving:
    """One server: its pools, its cache, its scheduler, and what it has sent to whom."""

    def __init__(self, *, page_size=4, num_pages=24, num_rows=6, context=64, overlap=False, eagle=False, **options):
        modes = srt("model_executor.forward_batch_info").ForwardMode
        self.modes, self.page_size, self.overlap = modes, page_size, overlap
        self.rows = self.make_rows(num_rows, context, options.get("disaggregation_mode"))
        self.allocator = self.make_allocator(num_pages)
        kind = srt("mem_cache.memory_pool").MLATokenToKVPool
        self.kv_pool = kind.__new__(kind)  # its buffer is all that is wanted of it
        self.kv_pool.kv_buffer = [torch.zeros((num_pages + 1) * page_size, 1, dtype=torch.int64)]
        self.kv_pool.layer_num, self.kv_pool.page_size = 1, page_size
        self.kv_pool.store_dtype, self.kv_pool.enable_custom_mem_pool = torch.int64, False
        self.kv_pool.dcp_replicated, self.kv_pool.cpu_offloading_chunk_size = True, 8
        self.allocator._kvcache = self.kv_pool
        self.kv = self.kv_pool.kv_buffer[0][:, 0]
        self.speculation = SimpleNamespace(
            name="EAGLE" if eagle else "NONE", is_eagle=lambda: eagle, is_none=lambda: not eagle
        )
        self.options = SimpleNamespace(**(UNGUARDED | options))
        config = SimpleNamespace(is_encoder_decoder=False, hf_config=SimpleNamespace(to_dict=lambda: {"layers": 2}))
        self.runner = srt("model_executor.model_runner").ModelRunner(
            pools=(self.rows, self.allocator, self.kv_pool),
            options=self.options,
            compute=self.compute,
            others=(config, self.speculation),
        )
        self.before_compute = []  # what happens while a step runs
        self.sent, self.ended, self.reqs, self.waiting = {}, {}, {}, []

    def start(self):
        """As a server does: pools, graphs, prefix cache, scheduler."""
        self.runner._init_post_memory_pool_components()
        self.tree = self._make_tree()
        self.processor = self.make_processor()
        self.scheduler = srt("managers.scheduler").Scheduler(self.runner, self.tree, self.processor)
        return self

    def make_rows(self, num_rows, context, mode):
        if mode == "decode":
            return srt("disaggregation.decode").DecodeReqToTokenPool(num_rows, context, "cpu", False, 2)
        return srt("mem_cache.memory_pool").ReqToTokenPool(num_rows, context, "cpu", False)

    def make_queues(self):
        """Of a decode server: before a transfer, and behind it."""
        decode = srt("disaggregation.decode")
        prealloc, transfers = (kind.__new__(kind) for kind in (decode.DecodePreallocQueue, decode.DecodeTransferQueue))
        for queue in (prealloc, transfers):
            queue.req_to_token_pool, queue.token_to_kv_pool_allocator = self.rows, self.allocator
            queue.tree_cache, queue.scheduler = self.tree, self.scheduler
        transfers.enable_staging = transfers.enable_host_receive = False
        transfers.req_to_metadata_buffer_idx_allocator = SimpleNamespace(free=lambda index: None)
        transfers.metadata_buffers = SimpleNamespace(clear_slot=lambda index: None)
        return prealloc, transfers

    def commit(self, transfers, req, token, room=None):
        """A transfer is said to be complete, with the other server's token, made in ``room`` (None: its own)."""
        sent = [token], [req.bootstrap_room if room is None else room]
        transfers.metadata_buffers = SimpleNamespace(get_buf=lambda index: sent)
        decode_req = SimpleNamespace(req=req, metadata_buffer_index=0, kv_receiver=SimpleNamespace())
        transfers._commit_transfer_to_req(decode_req)
        return decode_req

    def make_allocator(self, num_pages):
        if self.page_size == 1:
            return srt("mem_cache.allocator.token").TokenToKVPoolAllocator(num_pages, torch.uint8, "cpu", None, False)
        paged = srt("mem_cache.allocator.paged").PagedTokenToKVPoolAllocator
        return paged(num_pages * self.page_size, self.page_size, torch.uint8, "cpu", None, False)

    def make_cache(self, disable):
        params = SimpleNamespace(
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.page_size,
            disable=disable,
            is_eagle=self.speculation.is_eagle(),
        )
        return srt("mem_cache.unified_radix_cache").UnifiedRadixCache(params)

    def make_processor(self):
        return srt("managers.scheduler_components.batch_result_processor").SchedulerBatchResultProcessor(
            enable_overlap=self.overlap,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.tree,
            output_streamer=self,
        )

    def make_request(self, rid, tokens, max_new, **names):
        params = srt("sampling.sampling_params").SamplingParams(max_new_tokens=max_new)
        return srt("managers.schedule_batch").Req(rid, "", tokens, params, **names)

    def _make_tree(self):
        built = srt("mem_cache.kv_cache_builder").build_kv_cache(
            server_args=self.options,
            model_config=None,
            tp_worker=self,
            page_size=self.page_size,
            spec_algorithm=self.speculation,
            enable_metrics=False,
            enable_kv_cache_events=False,
            enable_hierarchical_cache=False,
        )
        return built.tree_cache

    def submit(self, rid, tokens, max_new=4, **names):
        req = self.make_request(rid, array("q", tokens), max_new, **names)
        self.reqs[rid], self.sent[rid] = req, []
        return req

    def compute(self, forward):
        """Store the tokens, then read each row."""
        for call in self.before_compute:
            call()
        self.kv[forward.out_cache_loc] = forward.input_ids
        mode, table = forward.forward_mode, self.rows.req_to_token
        ahead = len(forward.out_cache_loc) // forward.batch_size if mode.is_target_verify() else 0
        answers = []
        for row, length in zip(forward.req_pool_indices.tolist(), forward.seq_lens.tolist(), strict=True):
            ends = range(length + 1, length + ahead + 1) if ahead else [length]
            answers.append([expected(self.kv[table[row, :end].long()].tolist()) for end in ends])
        return torch.tensor(answers) if ahead else torch.tensor(answers).reshape(-1)

    def prefill(self, *reqs, chunk=None, run=True):
        """Admit, or go on with, requests; returns what `process` takes."""
        for req in reqs:
            is_new = not req.kv.holds_kv
            req.init_next_round_input(self.tree if is_new else None)
            length = len(req.full_untruncated_fill_ids)
            req.extend_end = length if chunk is None else min(length, req.prefix_len + chunk)
            req.inflight_middle_chunks += req.extend_end < length
            req.is_retracted = False
            if is_new:
                req.lock = self.tree.lock(req.last_node)
        batch = Batch(self, reqs, self.modes.EXTEND)
        batch.prefix_lens, batch.extend_lens = [r.prefix_len for r in reqs], [r.extend_len for r in reqs]
        batch.extend_num_tokens = sum(batch.extend_lens)
        batch.seq_lens_cpu = torch.tensor([req.extend_end for req in reqs])
        batch.seq_lens = batch.seq_lens_cpu.clone()
        batch.out_cache_loc, _, _ = srt("managers.schedule_batch").alloc_for_extend(batch)
        batch.rows()
        spans = [range(req.prefix_len, req.extend_end) for req in reqs]
        batch.positions = torch.tensor([place for span in spans for place in span])
        batch.input_ids = torch.tensor(
            [r.full_untruncated_fill_ids[p] for r, span in zip(reqs, spans, strict=True) for p in span]
        )
        return batch, self.scheduler.run_batch(batch) if run else None

    def mix(self, new, *running, chunk=None):
        """A prompt, or a part of it, and a token for each of those that run, in one batch."""
        batch, _ = self.prefill(new, chunk=chunk, run=False)
        tail, _ = self.decode(*running, run=False)
        for name in ("seq_lens", "seq_lens_cpu", "out_cache_loc", "positions", "input_ids"):
            setattr(batch, name, torch.cat([getattr(batch, name), getattr(tail, name)]))
        batch.reqs, batch.decoding_reqs = [*batch.reqs, *tail.reqs], tail.reqs
        batch.extend_lens = [*batch.extend_lens, *[1] * len(running)]
        batch.rows()
        batch.forward_mode = self.modes.MIXED
        return batch, self.scheduler.run_batch(batch)

    def decode(self, *reqs, behind=None, run=True):
        """A token for each; ``behind`` is a step that was launched, whose tokens the host does not know yet."""
        batch = Batch(self, reqs, self.modes.DECODE)
        batch.rows()
        if behind is None:
            known = [len(req.origin_input_ids) + len(req.output_ids) - 1 for req in reqs]
            batch.seq_lens_cpu = torch.tensor(known)
            batch.input_ids = torch.tensor([req.output_ids[-1] for req in reqs])
        else:
            batch.seq_lens_cpu = behind[0].seq_lens_cpu.clone()
            batch.input_ids = behind[1].next_token_ids
        batch.seq_lens = batch.seq_lens_cpu.clone()
        batch.out_cache_loc = srt("managers.schedule_batch").alloc_for_decode(batch, token_per_req=1)
        batch.positions = batch.seq_lens.clone()
        batch.seq_lens, batch.seq_lens_cpu = batch.seq_lens + 1, batch.seq_lens_cpu + 1
        return batch, self.scheduler.run_batch(batch) if run else None

    def speculate(self, *reqs, num_drafts=3):
        """Drafts of which the first is right are verified: two tokens for each."""
        batch = Batch(self, reqs, self.modes.DECODE)
        batch.verify_mode = self.modes.TARGET_VERIFY
        batch.rows()
        now = [req.kv.kv_allocated_len for req in reqs]
        size = self.page_size
        then = [
            max(n, -(-(r.kv.kv_committed_len + 2 * num_drafts) // size) * size) for r, n in zip(reqs, now, strict=True)
        ]
        srt("speculative.eagle_utils").alloc_for_spec_decode(
            self.tree,
            self.rows,
            reqs=batch.reqs,
            req_pool_indices=batch.req_pool_indices,
            cur_kv_lens=torch.tensor(now),
            cur_kv_lens_cpu=torch.tensor(now),
            nxt_kv_lens=torch.tensor(then),
            nxt_kv_lens_cpu=torch.tensor(then),
            num_needed_tokens=sum(then) - sum(now),
            batch=batch,
        )
        batch.seq_lens_cpu = torch.tensor([req.kv.kv_committed_len for req in reqs])
        batch.seq_lens = batch.seq_lens_cpu.clone()
        drafts, slots = [], []
        for req, length in zip(reqs, batch.seq_lens.tolist(), strict=True):
            tokens = [*req.origin_input_ids, *req.output_ids]
            drafts += [tokens[-1], expected(tokens), *[1] * (num_drafts - 2)]
            slots.append(self.rows.req_to_token[req.kv.req_pool_idx, length : length + num_drafts].long())
        batch.input_ids, batch.out_cache_loc = torch.tensor(drafts), torch.cat(slots)
        batch.positions = None
        _, result = launched = batch, self.scheduler.run_batch(batch)
        result.next_token_ids = result.next_token_ids[:, :2].reshape(-1)
        result.accept_lens = torch.full((len(reqs),), 2)
        result.speculative_output_stride = 2
        return launched

    def process(self, launched):
        self.scheduler.process_batch_result(*launched)

    def step(self, *reqs, **how):
        """A prefill or a decode of requests, processed at once."""
        holds = reqs[0].kv.holds_kv and bool(reqs[0].output_ids)
        self.process((self.decode if holds else self.prefill)(*reqs, **how))

    def finish(self, *reqs, most=40):
        """Decode until all have ended."""
        for _ in range(most):
            alive = [req for req in reqs if not req.finished()]
            if not alive:
                return
            self.step(*alive)
        raise AssertionError("they do not end")

    def stream_output(self, reqs, return_logprob, skip_req=None):
        """What a user is sent."""
        for req in reqs:
            if req is not skip_req and req.rid not in self.ended:
                self.sent[req.rid] = list(req.output_ids)
                if req.finished():
                    self.ended[req.rid] = req.finished_reason

    def wrong(self):
        """Requests that were sent a token which their own tokens do not give."""
        return [rid for rid, sent in self.sent.items() if sent != self.right(rid, len(sent))]

    def right(self, rid, count):
        tokens = list(self.reqs[rid].origin_input_ids)
        for _ in range(count):
            tokens.append(expected(tokens))
        return tokens[len(self.reqs[rid].origin_input_ids) :]

    def checkpoint(self, req):
        """Between the chunks of a prompt."""
        srt("managers.scheduler").checkpoint_kv_cache(req, self.tree)

    def retract(self, req):
        """Give up a running request; it begins anew."""
        srt("mem_cache.common").release_kv_cache(req, self.tree, checkpoint=False)
        req.reset_for_retract()

    def flush(self):
        self.tree.reset()
        self.rows.clear()
        self.allocator.clear()

    def num_lost(self):
        """Tokens that are neither free nor the cache's, when no request runs."""
        held = self.tree.evictable_size() + self.tree.protected_size()
        return self.allocator.size - self.allocator.available_size() - held
