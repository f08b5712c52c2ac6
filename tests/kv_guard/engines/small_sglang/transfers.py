"""Disaggregated serving: buffers that are sent, and what a decode server does before and behind a transfer."""

import torch

from tests.kv_guard.engines.small_sglang.places import at, srt


@at("mem_cache.memory_pool")
class MLATokenToKVPool:
    def get_contiguous_buf_infos(self):
        return (
            [buffer.data_ptr() for buffer in self.kv_buffer],
            [buffer.nbytes for buffer in self.kv_buffer],
            [buffer[0].nbytes * self.page_size for buffer in self.kv_buffer],
        )


@at("disaggregation.decode")
class DecodeReqToTokenPool:
    def __init__(self, size, max_context_len, device, enable_memory_saver, pre_alloc_size):
        self.size, self.max_context_len, self.device = size, max_context_len, device
        self._alloc_size = size + pre_alloc_size + 1
        self.req_to_token = torch.zeros(self._alloc_size, max_context_len, dtype=torch.int32)
        self.free_slots = list(range(1, self._alloc_size))

    def write(self, indices, values):
        self.req_to_token[indices] = values.to(torch.int32)

    def alloc(self, reqs):
        new = [req for req in reqs if not req.kv.holds_kv]
        if len(new) > len(self.free_slots):
            return None
        rows, self.free_slots = self.free_slots[: len(new)], self.free_slots[len(new) :]
        for req, row in zip(new, rows, strict=True):
            req.kv.req_pool_idx = row
        return [req.kv.req_pool_idx for req in reqs]

    def free(self, req):
        self.free_slots.append(req.kv.req_pool_idx)
        req.kv.req_pool_idx = None

    def clear(self):
        self.free_slots = list(range(1, self._alloc_size))


@at("disaggregation.decode")
class DecodePreallocQueue:
    def _pre_alloc(self, req, prefix_indices=None, prefix_len=None, total_prefix_len=None):
        prefix = prefix_len or 0
        self.req_to_token_pool.alloc([req])
        row, length = req.kv.req_pool_idx, len(req.origin_input_ids) + max(len(req.output_ids) - 1, 0)
        if prefix:
            self.req_to_token_pool.write((row, slice(0, prefix)), prefix_indices)
        last = prefix_indices[-1:] if prefix else torch.tensor([-1])
        slots = self.token_to_kv_pool_allocator.alloc_extend(
            torch.tensor([prefix]),
            torch.tensor([prefix]),
            torch.tensor([length]),
            torch.tensor([length]),
            last,
            length - prefix,
        )
        self.req_to_token_pool.write((row, slice(prefix, length)), slots)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = length
        req.refresh_fill_ids()
        req.prefix_len, req.extend_end = prefix, length
        return slots


@at("disaggregation.decode")
class DecodeTransferQueue:
    def _commit_transfer_to_req(self, decode_req):
        sent = self.metadata_buffers.get_buf(decode_req.metadata_buffer_index)
        decode_req.kv_receiver = None
        if sent[1][0] == decode_req.req.bootstrap_room or _is_fake_transfer(decode_req.req):
            decode_req.req.output_ids.append(int(sent[0][0]))
        else:
            decode_req.req.finished_reason = srt("managers.schedule_batch").FINISH_ABORT("another room")

    def _release_request(self, decode_req):
        srt("mem_cache.common").release_kv_cache(decode_req.req, self.tree_cache, checkpoint=False)

    def _do_release(self, decode_req, idx):
        self._release_request(decode_req)
        decode_req.kv_receiver.kv_mgr.clear_deferred_abort_state(decode_req.req.bootstrap_room)
        decode_req.kv_receiver = None


@at("disaggregation.common.conn")
class CommonKVManager:
    def register_deferred_abort_room(self, bootstrap_room):
        self._deferred_abort_generation += 1
        self._deferred_abort_ack_tracker[bootstrap_room] = self._deferred_abort_generation, set()
        return self._deferred_abort_generation

    def note_abort_ack(self, bootstrap_room, prefill_rank, generation):
        armed, ranks = self._deferred_abort_ack_tracker.get(bootstrap_room, (None, None))
        if armed == generation:
            ranks.add(prefill_rank)

    def is_abort_release_safe(self, bootstrap_room, required_acks):
        return len(self._deferred_abort_ack_tracker.get(bootstrap_room, (None, ()))[1]) >= required_acks

    def clear_deferred_abort_state(self, bootstrap_room):
        self._deferred_abort_ack_tracker.pop(bootstrap_room, None)

    def get_mla_kv_ptrs_with_pp(self, src_kv_ptrs, dst_kv_ptrs, state_type=None):
        return src_kv_ptrs, dst_kv_ptrs[: len(src_kv_ptrs)], len(src_kv_ptrs)


@at("disaggregation.utils", "disaggregation.decode")
def _is_fake_transfer(req):
    return req.bootstrap_host == "2.2.2.2"


def _slots_of(req, row_pool):
    return row_pool.req_to_token[req.kv.req_pool_idx, : req.seqlen - 1].long()


@at("mem_cache.common", "managers.schedule_batch")
def backup_kv_cache(req, tree_cache, req_to_token_pool, token_to_kv_pool_allocator, backend):
    if backend != "cpu_tensor":
        return False
    (buffer,) = token_to_kv_pool_allocator._kvcache.kv_buffer
    req.kv.retraction_backup = buffer[_slots_of(req, req_to_token_pool)]
    return True


@at("mem_cache.common", "disaggregation.decode")
def restore_kv_cache(req, tree_cache, req_to_token_pool, token_to_kv_pool_allocator, backend):
    (buffer,) = token_to_kv_pool_allocator._kvcache.kv_buffer
    buffer[_slots_of(req, req_to_token_pool)] = req.kv.retraction_backup
    req.kv.retraction_backup = None
