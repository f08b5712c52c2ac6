"""The functions that know which request gets which slots."""

import torch

from tests.kv_guard.engines.small_sglang.places import at, srt

OUT_OF_MEMORY = "Out of memory. Try to lower your batch size."


def _alloc(tree_cache, num_tokens, call):
    srt("mem_cache.allocation").evict_from_tree_cache(tree_cache, num_tokens)
    slots = call(tree_cache.token_to_kv_pool_allocator)
    if slots is None:
        raise RuntimeError(OUT_OF_MEMORY)
    return slots


@at("mem_cache.allocation", "managers.schedule_batch")
def alloc_for_extend(batch):
    tree, table = batch.tree_cache, batch.req_to_token_pool
    prefixes = [
        table.req_to_token[req.kv.req_pool_idx, : req.prefix_len].to(torch.int64)
        if req.kv.holds_kv
        else tree.prefix_device_indices(req)
        for req in batch.reqs
    ]
    rows = table.alloc(batch.reqs)
    if rows is None:
        raise RuntimeError(OUT_OF_MEMORY)
    if tree.page_size == 1:
        slots = _alloc(tree, batch.extend_num_tokens, lambda allocator: allocator.alloc(batch.extend_num_tokens))
    else:
        prefix_lens = torch.tensor(batch.prefix_lens)
        last = torch.tensor([int(slots[-1]) if len(slots) else -1 for slots in prefixes])
        slots = _alloc(
            tree,
            batch.extend_num_tokens + len(rows) * tree.page_size,
            lambda allocator: allocator.alloc_extend(
                prefix_lens,
                prefix_lens,
                batch.seq_lens,
                batch.seq_lens_cpu,
                last,
                batch.extend_num_tokens,
            ),
        )
    start = 0
    for req, row, prefix in zip(batch.reqs, rows, prefixes, strict=True):
        end = start + req.extend_len
        table.write((row, slice(0, len(prefix))), prefix)
        table.write((row, slice(len(prefix), len(prefix) + req.extend_len)), slots[start:end])
        req.kv.kv_allocated_len = req.kv.kv_committed_len = len(prefix) + req.extend_len
        start = end
    rows = torch.tensor(rows)
    return slots, rows, rows


@at("mem_cache.allocation", "managers.schedule_batch")
def alloc_for_decode(batch, token_per_req):
    tree, table = batch.tree_cache, batch.req_to_token_pool
    if tree.page_size == 1:
        slots = _alloc(tree, len(batch.reqs), lambda allocator: allocator.alloc(len(batch.reqs)))
    else:
        last = table.req_to_token[batch.req_pool_indices, batch.seq_lens - 1]
        then = batch.seq_lens_cpu + token_per_req
        slots = _alloc(
            tree,
            len(batch.reqs) * tree.page_size,
            lambda allocator: allocator.alloc_decode(then, then, last),
        )
    table.write((batch.req_pool_indices, batch.seq_lens.clone()), slots)
    for req in batch.reqs:
        req.kv.kv_allocated_len += token_per_req
        req.kv.kv_committed_len += token_per_req
    return slots


@at("mem_cache.allocation", "speculative.eagle_utils")
def alloc_for_spec_decode(
    tree_cache,
    req_to_token_pool,
    *,
    reqs,
    req_pool_indices,
    cur_kv_lens,
    cur_kv_lens_cpu,
    nxt_kv_lens,
    nxt_kv_lens_cpu,
    num_needed_tokens,
    batch=None,
):
    if num_needed_tokens > 0:
        if tree_cache.page_size == 1:
            slots = _alloc(tree_cache, num_needed_tokens, lambda allocator: allocator.alloc(num_needed_tokens))
        else:
            last = req_to_token_pool.req_to_token[req_pool_indices, cur_kv_lens.long() - 1]
            slots = _alloc(
                tree_cache,
                num_needed_tokens + len(reqs) * tree_cache.page_size,
                lambda allocator: allocator.alloc_extend(
                    cur_kv_lens, cur_kv_lens_cpu, nxt_kv_lens, nxt_kv_lens_cpu, last, num_needed_tokens
                ),
            )
        start = 0
        for row, now, then in zip(req_pool_indices, cur_kv_lens_cpu, nxt_kv_lens_cpu, strict=True):
            end = start + int(then - now)
            req_to_token_pool.write((row, slice(int(now), int(then))), slots[start:end])
            start = end
    for req, then in zip(reqs, nxt_kv_lens_cpu.tolist(), strict=True):
        req.kv.kv_allocated_len = max(req.kv.kv_allocated_len, then)
