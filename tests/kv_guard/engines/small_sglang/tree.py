"""The prefix cache: a tree with a page a node, and what requests do with it."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from tests.kv_guard.engines.small_sglang.places import at


@at("mem_cache.radix_cache")
class RadixKey:
    def __init__(self, token_ids, extra_key=None, is_bigram=False, limit=None, cache_salt=None):
        self.token_ids = token_ids if limit is None else token_ids[:limit]
        self.extra_key, self.cache_salt, self.is_bigram = extra_key, cache_salt, is_bigram

    def __len__(self):
        return max(len(self.token_ids) - self.is_bigram, 0)

    def page_aligned(self, page_size):
        length = len(self) // page_size * page_size
        return RadixKey(
            self.token_ids[: length + self.is_bigram], self.extra_key, self.is_bigram, cache_salt=self.cache_salt
        )

    def pages(self, page_size):
        names = (self.extra_key, self.cache_salt)
        for first in range(0, len(self) // page_size * page_size, page_size):
            yield (*names, *self.token_ids[first : first + page_size + self.is_bigram])


@at("mem_cache.base_prefix_cache")
@dataclass
class InsertParams:
    key: Any = None
    value: Any = None


@dataclass(eq=False)
class _Node:
    parent: Any = None
    name: tuple = ()
    page: Any = None  # slots
    children: dict = field(default_factory=dict)
    locks: int = 0
    used: int = 0


@at("mem_cache.unified_radix_cache")
class UnifiedRadixCache:
    def __init__(self, params):
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size, self.disable = params.page_size, params.disable
        self.tree_core = SimpleNamespace(is_eagle=params.is_eagle)
        self.reset()

    def reset(self):
        self.root, self.clock = _Node(locks=1), 0

    def supports_prefix_sharing(self):
        return not self.disable

    def match(self, key):
        node, length = self.root, 0
        self.clock += 1
        for name in [] if self.disable else key.pages(self.page_size):
            if name not in node.children:
                break
            node, length = node.children[name], length + self.page_size
            node.used = self.clock
        return node, length

    def insert(self, params):
        if self.disable:
            return SimpleNamespace(prefix_len=0, last_device_node=self.root)
        node, there = self.root, None
        for index, name in enumerate(params.key.pages(self.page_size)):
            if name not in node.children:
                there = index * self.page_size if there is None else there
                slots = params.value[index * self.page_size : (index + 1) * self.page_size].clone()
                node.children[name] = _Node(parent=node, name=name, page=slots, used=self.clock)
            node = node.children[name]
        length = len(params.key) // self.page_size * self.page_size
        return SimpleNamespace(prefix_len=length if there is None else there, last_device_node=node)

    def checkpoint(self, req, *, up_to, **kwargs):
        self.checkpoint_into_tree(req, up_to=up_to, **kwargs)

    def checkpoint_into_tree(self, req, *, up_to, **kwargs):
        if self.disable:
            return
        tokens, row = req.full_untruncated_fill_ids[:up_to], self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        key = RadixKey(tokens, req.extra_key, self.tree_core.is_eagle, cache_salt=req.cache_salt)
        key = key.page_aligned(self.page_size)
        values = row[: len(key)].to(torch.int64)
        result = self.insert(InsertParams(key=key, value=values))
        start = req.kv.cache_protected_len
        if start < result.prefix_len:
            self.token_to_kv_pool_allocator.free_segment(values[start : result.prefix_len], start_pos=start)
        path = self.path_device_indices(result.last_device_node)
        self.req_to_token_pool.write((req.kv.req_pool_idx, slice(start, len(path))), path[start:])
        self.unlock(req.lock)
        req.lock, req.last_node = self.lock(result.last_device_node), result.last_device_node
        req.kv.cache_protected_len = len(path)

    def path_device_indices(self, node):
        slots = []
        while node is not self.root:
            slots.insert(0, node.page)
            node = node.parent
        return torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64)

    def prefix_device_indices(self, req):
        return self.path_device_indices(req.last_node)[: req.prefix_len]

    def lock(self, node):
        holder = node
        while node is not None:
            node.locks += 1
            node = node.parent
        return holder

    def unlock(self, node):
        while node is not None:
            node.locks -= 1
            node = node.parent

    def evict(self, num_tokens):
        freed = 0
        while freed < num_tokens:
            leaves = [node for node in self._nodes(self.root) if not node.children and not node.locks]
            if not leaves:
                return
            leaf = min(leaves, key=lambda node: node.used)
            del leaf.parent.children[leaf.name]
            self.token_to_kv_pool_allocator.free_segment(leaf.page, start_pos=0)
            freed += self.page_size

    def free_kv_row(self, kv, ranges):
        row = self.req_to_token_pool.req_to_token[kv.req_pool_idx]
        for start, end in ranges:
            self.token_to_kv_pool_allocator.free_segment(row[start:end], start_pos=start)

    def evictable_size(self):
        return sum(self.page_size for node in self._nodes(self.root) if not node.locks)

    def protected_size(self):
        return sum(self.page_size for node in self._nodes(self.root) if node.locks)

    def _nodes(self, node):
        for child in node.children.values():
            yield child
            yield from self._nodes(child)


@at("mem_cache.common", "mem_cache.allocation")
def evict_from_tree_cache(tree_cache, num_tokens):
    if tree_cache.supports_prefix_sharing():
        tree_cache.evict(num_tokens - tree_cache.token_to_kv_pool_allocator.available_size())


@at("mem_cache.common")
def match_kv_cache(req, tree_cache, token_ids=None, *, cow_mamba=False, max_prefix_len=None):
    key = RadixKey(token_ids, req.extra_key, tree_cache.tree_core.is_eagle, max_prefix_len, req.cache_salt)
    req.last_node, req.prefix_len = tree_cache.match(key)


@at("mem_cache.common", "managers.scheduler", "managers.scheduler_components.batch_result_processor")
def checkpoint_kv_cache(req, tree_cache):
    if not req.skip_radix_cache_insert:
        tree_cache.checkpoint(req, up_to=req.extend_end)
    req.prefix_len = req.extend_end


@at("mem_cache.common", "managers.schedule_batch", "managers.scheduler_components.batch_result_processor")
def release_kv_cache(req, tree_cache, *, checkpoint):
    owned = min(req.kv.kv_committed_len, req.kv.kv_allocated_len)
    if checkpoint and not req.skip_radix_cache_insert:
        req.refresh_fill_ids()
        tree_cache.checkpoint(req, up_to=owned)
    tree_cache.free_kv_row(req.kv, [(req.kv.cache_protected_len, owned)])
    tree_cache.unlock(req.lock)
    req.lock = None
    size = tree_cache.page_size
    behind = -(-owned // size) * size
    if behind < req.kv.kv_allocated_len:
        tree_cache.free_kv_row(req.kv, [(behind, req.kv.kv_allocated_len)])
    tree_cache.req_to_token_pool.free(req)
    req.kv.mark_kv_released()


@at("mem_cache.kv_cache_builder")
def build_kv_cache(
    *,
    server_args,
    model_config,
    tp_worker,
    page_size,
    spec_algorithm,
    enable_metrics,
    enable_kv_cache_events,
    enable_hierarchical_cache,
    hicache_draft_plan=None,
    dynamo_kv_event_format=False,
    kv_event_lora_names=None,
    draft_swa_window=0,
):
    return SimpleNamespace(tree_cache=tp_worker.make_cache(server_args.disable_radix_cache))
