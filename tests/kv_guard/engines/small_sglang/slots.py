"""Allocators of slots and the pool of rows."""

import torch

from tests.kv_guard.engines.small_sglang.places import at


@at("mem_cache.allocator.base")
class BaseTokenToKVPoolAllocator:
    def __init__(self, size, page_size, dtype, device, kvcache, need_sort):
        self.size, self.page_size, self.device = size, page_size, device
        self._kvcache, self.need_sort = kvcache, need_sort
        self.free_group = None

    def resize(self, config):
        self.size = config.max_total_num_tokens
        if self.page_size > 1:
            self.num_pages = self.size // self.page_size
        self.clear()

    def available_size(self):
        return len(self.free_pages) * self.page_size

    def free_group_begin(self):
        assert self.free_group is None
        self.free_group = []

    def free_group_end(self):
        pending, self.free_group = self.free_group, None
        if pending:
            self.free(torch.cat(pending))


@at("mem_cache.allocator.paged")
class PagedTokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    def __init__(self, size, page_size, dtype, device, kvcache, need_sort):
        super().__init__(size, page_size, dtype, device, kvcache, need_sort)
        self.num_pages = size // page_size
        self.clear()

    def clear(self):
        self.free_pages = torch.arange(1, self.num_pages + 1)
        self.free_group, self.free_page_ids_group = None, []

    def alloc(self, need_size):
        pages = self._pop(need_size // self.page_size)
        return None if pages is None else (pages[:, None] * self.page_size + torch.arange(self.page_size)).reshape(-1)

    def alloc_extend(
        self, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages=None
    ):
        size, slots = self.page_size, []
        spans = list(zip(prefix_lens_cpu.tolist(), seq_lens_cpu.tolist(), last_loc.tolist(), strict=True))
        pages = self._pop(sum(-(-end // size) - -(-begin // size) for begin, end, _ in spans))
        if pages is None:
            return None
        fresh = iter(pages.tolist())
        for begin, end, last in spans:
            slot = last
            for place in range(begin, end):
                slot = next(fresh) * size if place % size == 0 else slot + 1
                slots.append(slot)
        assert len(slots) == extend_num_tokens
        return torch.tensor(slots, dtype=torch.int64)

    def alloc_decode(self, seq_lens, seq_lens_cpu, last_loc):
        return PagedTokenToKVPoolAllocator._extend_by_one(self, seq_lens_cpu, last_loc)

    def _extend_by_one(self, seq_lens_cpu, last_loc):
        begins = [length % self.page_size == 1 % self.page_size for length in seq_lens_cpu.tolist()]
        pages = self._pop(sum(begins))
        if pages is None:
            return None
        fresh = iter(pages.tolist())
        slots = [
            next(fresh) * self.page_size if new else last + 1
            for new, last in zip(begins, last_loc.tolist(), strict=True)
        ]
        return torch.tensor(slots, dtype=torch.int64)

    def free(self, free_index):
        if free_index.numel() == 0:
            return
        if self.free_group is None:
            self._release_page_ids(torch.unique(free_index // self.page_size))
        else:
            self.free_group.append(free_index.clone())

    def free_segment(self, free_index, *, start_pos):
        assert start_pos % self.page_size == 0
        if free_index.numel():
            self.free_page_ids(free_index[:: self.page_size] // self.page_size)

    def free_page_ids(self, page_ids):
        if self.free_group is None:
            self._release_page_ids(page_ids)
        else:
            self.free_page_ids_group.append(page_ids.clone())

    def free_group_begin(self):
        super().free_group_begin()
        self.free_page_ids_group = []

    def free_group_end(self):
        super().free_group_end()
        if self.free_page_ids_group:
            self._release_page_ids(torch.cat(self.free_page_ids_group))
            self.free_page_ids_group = []

    def _release_page_ids(self, *page_ids):
        self.free_pages = torch.cat((*page_ids, self.free_pages))

    def _pop(self, count):
        if count > len(self.free_pages):
            return None
        pages, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return pages


@at("mem_cache.allocator.token")
class TokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    def __init__(self, size, dtype, device, kvcache, need_sort):
        super().__init__(size, 1, dtype, device, kvcache, need_sort)
        self.clear()

    def clear(self):
        self.free_pages = torch.arange(1, self.size + 1)
        self.free_group = None

    def alloc(self, need_size):
        if need_size > len(self.free_pages):
            return None
        slots, self.free_pages = self.free_pages[:need_size], self.free_pages[need_size:]
        return slots

    def free(self, free_index):
        if free_index.numel() == 0:
            return
        if self.free_group is None:
            self.free_pages = torch.cat((self.free_pages, free_index))
        else:
            self.free_group.append(free_index.clone())

    def free_segment(self, free_index, *, start_pos):
        self.free(free_index)


@at("mem_cache.memory_pool")
class ReqToTokenPool:
    def __init__(self, size, max_context_len, device, enable_memory_saver):
        self.size, self.max_context_len, self.device = size, max_context_len, device
        self.req_to_token = torch.zeros(size + 1, max_context_len, dtype=torch.int32)
        self.free_slots = list(range(1, size + 1))

    def write(self, indices, values):
        self.req_to_token[indices] = values.to(torch.int32)

    def alloc(self, reqs):
        new = [req for req in reqs if not req.kv.holds_kv]
        rows = self.alloc_rows(len(new))
        if rows is None:
            return None
        for req, row in zip(new, rows, strict=True):
            req.kv.req_pool_idx = row
        return [req.kv.req_pool_idx for req in reqs]

    def alloc_rows(self, need_size):
        if need_size > len(self.free_slots):
            return None
        rows = self.free_slots[len(self.free_slots) - need_size :]
        del self.free_slots[len(self.free_slots) - need_size :]
        return rows

    def free_rows(self, indices):
        self.free_slots.extend(indices)

    def free(self, req):
        self.free_rows([req.kv.req_pool_idx])
        req.kv.req_pool_idx = None

    def clear(self):
        self.free_slots = list(range(1, self.size + 1))
