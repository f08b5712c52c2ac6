"""Both model runners of the miniature: V1 keeps a batch whose rows move up when others leave; V2 keeps a request in one
row, and gathers what a step reads."""

from types import SimpleNamespace

import numpy as np
import torch

from tests.kv_guard.engines.small_vllm.workers import EMPTY_MODEL_RUNNER_OUTPUT, PADDING, Buffer, Runner


class RunnerV2(Runner):
    """`vllm.v1.worker.gpu.model_runner.GPUModelRunner`."""

    def _make_tables(self, num_groups):
        tables = [
            SimpleNamespace(gpu=torch.zeros(self.max_num_reqs, self.max_pages, dtype=torch.int32))
            for _ in range(num_groups)
        ]
        self.block_tables = SimpleNamespace(
            block_tables=tables, num_blocks=np.zeros((num_groups, self.max_num_reqs), int)
        )
        self.input_block_tables = [torch.zeros_like(table.gpu) for table in tables]
        self.req_states = SimpleNamespace(req_id_to_index={}, free_indices=list(range(self.max_num_reqs)))
        self.num_computed = np.zeros(self.max_num_reqs, int)

    def _append(self, row, block_ids, *, overwrite):
        for group, ids in enumerate(block_ids):
            start = 0 if overwrite else int(self.block_tables.num_blocks[group, row])
            self.block_tables.block_tables[group].gpu[row, start : start + len(ids)] = torch.tensor(
                ids, dtype=torch.int32
            )
            self.block_tables.num_blocks[group, row] = start + len(ids)

    def execute_model(
        self,
        scheduler_output,
        intermediate_tensors=None,
        dummy_run=False,
        skip_attn_for_dummy_run=False,
        is_profile=False,
        context_len=0,
        valid_dummy_state_slots=False,
        randomize_inputs=False,
    ):
        if dummy_run:
            return None
        self.drafts = getattr(scheduler_output, "scheduled_spec_decode_tokens", {})
        states = self.req_states
        for name in sorted(scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())):
            if name in states.req_id_to_index:
                states.free_indices.append(states.req_id_to_index.pop(name))
        for new in scheduler_output.scheduled_new_reqs:
            assert new.req_id not in states.req_id_to_index
            row = states.free_indices.pop()
            states.req_id_to_index[new.req_id] = row
            self.tokens[new.req_id] = list(new.prefill_token_ids)
            self.num_computed[row] = new.num_computed_tokens
            self._append(row, new.block_ids, overwrite=True)
        goes_on = scheduler_output.scheduled_cached_reqs
        for name, num_computed, ids in zip(
            goes_on.req_ids, goes_on.num_computed_tokens, goes_on.new_block_ids, strict=True
        ):
            self.num_computed[states.req_id_to_index[name]] = num_computed
            if ids is not None:
                self._append(states.req_id_to_index[name], ids, overwrite=False)
        if scheduler_output.total_num_scheduled_tokens == 0:
            return EMPTY_MODEL_RUNNER_OUTPUT
        requests = sorted(scheduler_output.num_scheduled_tokens, key=scheduler_output.num_scheduled_tokens.get)
        counts = [scheduler_output.num_scheduled_tokens[name] for name in requests]
        rows = np.array([states.req_id_to_index[name] for name in requests])
        self.before_forward(self)
        batch = self._batch(requests, counts, rows)
        tables, slots = self.prepare_attn(batch)
        self._forward(requests, counts, tables, slots, batch.seq_lens)
        return None

    def _batch(self, requests, counts, rows):
        lengths = self.num_computed[rows] + counts
        starts = np.concatenate(([0], np.cumsum(counts)))
        for number, count in enumerate(counts):
            first = int(lengths[number]) - count
            self.positions[starts[number] : starts[number + 1]] = torch.arange(first, first + count)
        padded = len(requests) + 2
        return SimpleNamespace(
            req_ids=requests,
            num_reqs=len(requests),
            num_reqs_after_padding=padded,
            num_tokens=int(starts[-1]),
            num_tokens_after_padding=int(starts[-1]) + 3,
            idx_mapping=torch.tensor(rows),
            seq_lens=torch.tensor(np.concatenate((lengths, [0, 0])), dtype=torch.int32),
            seq_lens_cpu_upper_bound=torch.tensor(np.concatenate((lengths, [0, 0])), dtype=torch.int32),
            query_start_loc=torch.tensor(np.concatenate((starts, [starts[-1]] * 2)), dtype=torch.int32),
            positions=self.positions[: int(starts[-1]) + 3],
        )

    def prepare_attn(self, input_batch):
        tables, groups = [], self.kv_cache_config.kv_cache_groups
        slots = torch.full((len(groups), input_batch.num_tokens_after_padding), PADDING)
        computed = (
            input_batch.seq_lens[: input_batch.num_reqs]
            - input_batch.query_start_loc[: input_batch.num_reqs + 1].diff()
        )
        for group, own in enumerate(self.block_tables.block_tables):
            table = self.input_block_tables[group]
            table[: input_batch.num_reqs_after_padding] = 0
            table[: input_batch.num_reqs] = own.gpu[input_batch.idx_mapping]
            reach = getattr(groups[group].kv_cache_spec, "num_retained_tokens", None)
            for number in range(input_batch.num_reqs):
                if reach is not None:
                    table[number, : max(0, int(computed[number]) - reach) // self.page_size] = 0
                tokens = slice(*input_batch.query_start_loc[number : number + 2].tolist())
                positions = input_batch.positions[tokens]
                pages = own.gpu[input_batch.idx_mapping[number], positions // self.page_size].long()
                slots[group, tokens] = pages * self.page_size + positions % self.page_size
            tables.append(table[: input_batch.num_reqs_after_padding])
        self.laid_out(tables, slots)
        return tuple(tables), slots

    def pool(self):
        return None


class RunnerV1(Runner):
    """`vllm.v1.worker.gpu_model_runner.GPUModelRunner`."""

    def _make_tables(self, num_groups):
        def table():
            return SimpleNamespace(
                block_table=Buffer(self.max_num_reqs, self.max_pages, dtype=torch.int32),
                slot_mapping=Buffer(self.max_num_tokens, dtype=torch.int64),
                max_num_blocks_per_req=self.max_pages,
            )

        self.input_batch = SimpleNamespace(req_ids=[], block_table=[table() for _ in range(num_groups)])
        self.requests: dict[str, SimpleNamespace] = {}
        self.query_start_loc = Buffer(self.max_num_reqs + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(self.max_num_reqs, dtype=torch.int32)
        self.optimistic_seq_lens_cpu = torch.zeros(self.max_num_reqs, dtype=torch.int32)

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        self.drafts = getattr(scheduler_output, "scheduled_spec_decode_tokens", {})
        for name in scheduler_output.finished_req_ids:
            self.requests.pop(name, None)
        for new in scheduler_output.scheduled_new_reqs:
            self.tokens[new.req_id] = list(new.prompt_token_ids)
            self.requests[new.req_id] = SimpleNamespace(
                ids=[list(ids) for ids in new.block_ids], computed=new.num_computed_tokens
            )
        goes_on = scheduler_output.scheduled_cached_reqs
        for name, num_computed, ids in zip(
            goes_on.req_ids, goes_on.num_computed_tokens, goes_on.new_block_ids, strict=True
        ):
            self.requests[name].computed = num_computed
            if name in goes_on.resumed_req_ids:
                self.requests[name].ids = [list(group) for group in ids]
                self.tokens[name] = list(goes_on.all_token_ids[name])
            elif ids is not None:
                for own, more in zip(self.requests[name].ids, ids, strict=True):
                    own.extend(more)
        if scheduler_output.total_num_scheduled_tokens == 0:
            return EMPTY_MODEL_RUNNER_OUTPUT
        scheduled = scheduler_output.num_scheduled_tokens
        kept = [name for name in self.input_batch.req_ids if name in scheduled]
        self.input_batch.req_ids = kept + [name for name in scheduled if name not in kept]
        for row, name in enumerate(self.input_batch.req_ids):
            for group, ids in enumerate(self.requests[name].ids):
                self.input_batch.block_table[group].block_table.np[row, : len(ids)] = ids
        self.before_forward(self)
        counts = [scheduled[name] for name in self.input_batch.req_ids]
        self._prepare_inputs(scheduler_output, np.array(counts, dtype=np.int32))
        tables = [table.block_table.gpu for table in self.input_batch.block_table]
        slots = [table.slot_mapping.gpu for table in self.input_batch.block_table]
        self._forward(list(self.input_batch.req_ids), counts, tables, slots, self.seq_lens)
        return None

    def _prepare_inputs(self, scheduler_output, num_scheduled_tokens):
        starts = np.concatenate(([0], np.cumsum(num_scheduled_tokens)))
        self.query_start_loc.np[: len(starts)] = starts
        self.query_start_loc.np[len(starts) :] = starts[-1]
        self.query_start_loc.copy_to_gpu()
        for row, name in enumerate(self.input_batch.req_ids):
            first, count = self.requests[name].computed, int(num_scheduled_tokens[row])
            self.seq_lens[row] = self.optimistic_seq_lens_cpu[row] = first + count
            self.positions[starts[row] : starts[row + 1]] = torch.arange(first, first + count)
        for table in self.input_batch.block_table:
            table.block_table.copy_to_gpu()
            for row in range(len(self.input_batch.req_ids)):
                positions = self.positions[starts[row] : starts[row + 1]]
                pages = table.block_table.gpu[row, positions // self.page_size].long()
                table.slot_mapping.gpu[starts[row] : starts[row + 1]] = (
                    pages * self.page_size + positions % self.page_size
                )
        self.laid_out(
            [table.block_table.gpu for table in self.input_batch.block_table],
            [table.slot_mapping.gpu for table in self.input_batch.block_table],
        )
        return torch.tensor(starts[1:] - 1), None, 1
