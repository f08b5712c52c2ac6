"""A miniature of what vLLM 0.33 does to pages of a KV cache, under its names and signatures: pool and managers.

What is here does what vLLM's does: the order of the free queue, cached pages that nobody has, pages that are cached
before the step that fills them, windows that put the null block in the place of what they left behind. The same tests
drive the scheduler of a real wheel (wheel.py), and one table of targets holds the signatures of both.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    block_id: int
    pool: "BlockPool"
    ref_cnt: int = 0
    block_hash: bytes | None = None
    is_null: bool = False


class FreeKVCacheBlockQueue(deque):
    def popleft_n(self, n):
        return [self.popleft() for _ in range(n)]

    def prepend_n(self, blocks):
        self.extendleft(reversed(blocks))

    def append_n(self, blocks):
        self.extend(blocks)


@dataclass
class KVCacheBlocks:
    blocks: tuple[Sequence[KVCacheBlock], ...]


class BlockPool:
    def __init__(self, num_gpu_blocks: int, enable_caching: bool, hash_block_size: int):
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.blocks = [KVCacheBlock(number, self) for number in range(num_gpu_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.cached: dict[bytes, dict[int, KVCacheBlock]] = {}
        self.null_block = self.free_block_queue.popleft()
        self.null_block.is_null = True

    def get_num_free_blocks(self):
        return len(self.free_block_queue)

    def get_cached_block(self, block_hash, group):
        found = self.cached.get(block_hash + group.to_bytes(4, "big"))
        return next(iter(found.values())) if found else None

    def cache_full_blocks(
        self, request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask=None
    ):
        for index in range(num_cached_blocks, num_full_blocks):
            block = blocks[index]
            if block.is_null or (block_mask is not None and not block_mask[index - num_cached_blocks]):
                continue
            assert block.block_hash is None
            block.block_hash = request.block_hashes[index] + kv_cache_group_id.to_bytes(4, "big")
            self.cached.setdefault(block.block_hash, {})[block.block_id] = block

    def _maybe_evict_cached_block(self, block):
        if block.block_hash is not None:
            found = self.cached[block.block_hash]
            del found[block.block_id]
            if not found:
                del self.cached[block.block_hash]
            block.block_hash = None

    def get_new_blocks(self, num_blocks: int):
        if num_blocks > self.get_num_free_blocks():
            raise ValueError(f"Cannot get {num_blocks} free blocks from the pool")
        blocks = self.free_block_queue.popleft_n(num_blocks)
        for block in blocks:
            self._maybe_evict_cached_block(block)
            assert block.ref_cnt == 0
            block.ref_cnt += 1
        return blocks

    def touch(self, blocks: Sequence[KVCacheBlock]):
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]):
        first, last = [], []
        for block in ordered_blocks:
            if block.is_null:
                continue
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (last if block.block_hash is not None and self.enable_caching else first).append(block)
        self.free_block_queue.prepend_n(first)
        self.free_block_queue.append_n(last)

    def evict_blocks(self, block_ids: set[int]):
        for number in block_ids:
            self._maybe_evict_cached_block(self.blocks[number])


class SingleTypeKVCacheManager:
    """Full attention; with ``window``, a sliding one."""

    def __init__(self, spec, group: int, pool: BlockPool):
        self.kv_cache_spec, self.block_size = spec, spec.block_size
        self.group, self.block_pool = group, pool
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}
        self.num_cached_block: dict[str, int] = {}

    def skipped(self, num_tokens: int) -> int:
        window = getattr(self.kv_cache_spec, "sliding_window", None)
        return 0 if window is None else max(0, num_tokens - window + 1)

    def hit(self, request, num_pages: int) -> list[KVCacheBlock]:
        """From the first page on; a window asks for its own pages, here more simply for all."""
        found = []
        for block_hash in request.block_hashes[:num_pages]:
            block = self.block_pool.get_cached_block(block_hash, self.group)
            if block is None:
                break
            found.append(block)
        return found

    def adopt(self, request, blocks, num_tokens: int):
        num_skipped = self.skipped(num_tokens) // self.block_size
        self.block_pool.touch(blocks[num_skipped:])
        self.req_to_blocks[request.request_id] = [self.block_pool.null_block] * num_skipped + blocks[num_skipped:]
        self.num_cached_block[request.request_id] = len(blocks)

    def remove_skipped_blocks(self, name: str, num_tokens: int, num_prompt_tokens: int | None = None):
        blocks = self.req_to_blocks.get(name, [])
        freed = []
        for index in range(min(self.skipped(num_tokens) // self.block_size, len(blocks)) - 1, -1, -1):
            if blocks[index].is_null:
                break
            freed.append(blocks[index])
            blocks[index] = self.block_pool.null_block
        self.block_pool.free_blocks(freed)

    def num_missing(self, name: str, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self.block_size) - len(self.req_to_blocks.get(name, [])))

    def allocate(self, name: str, num_tokens: int):
        new = self.block_pool.get_new_blocks(self.num_missing(name, num_tokens))
        self.req_to_blocks.setdefault(name, []).extend(new)
        return new

    def cache_blocks(self, request, num_tokens: int):
        done = self.num_cached_block.get(request.request_id, 0)
        full = min(num_tokens // self.block_size, len(request.block_hashes))
        if full > done:
            blocks = self.req_to_blocks[request.request_id]
            self.block_pool.cache_full_blocks(
                request=request,
                blocks=blocks,
                num_cached_blocks=done,
                num_full_blocks=full,
                block_size=self.block_size,
                kv_cache_group_id=self.group,
                block_mask=None,
            )
            self.num_cached_block[request.request_id] = full

    def pop_blocks_for_free(self, name: str):
        self.num_cached_block.pop(name, None)
        return self.req_to_blocks.pop(name, [])


class KVCacheManager:
    def __init__(self, kv_cache_config, hash_block_size: int, enable_caching: bool):
        self.block_pool = BlockPool(kv_cache_config.num_blocks, enable_caching, hash_block_size)
        self.enable_caching = enable_caching
        sides = [
            SingleTypeKVCacheManager(group.kv_cache_spec, number, self.block_pool)
            for number, group in enumerate(kv_cache_config.kv_cache_groups)
        ]
        self.coordinator = SimpleNamespace(single_type_managers=tuple(sides))
        self.sides = sides

    def get_computed_blocks(self, request, max_cache_hit_length=None):
        if not self.enable_caching:
            return KVCacheBlocks(tuple([] for _ in self.sides)), 0, 0
        most = (request.num_tokens - 1) // self.sides[0].block_size
        hits = [side.hit(request, most) for side in self.sides]
        num_pages = min(len(hit) for hit in hits)
        return KVCacheBlocks(tuple(hit[:num_pages] for hit in hits)), num_pages * self.sides[0].block_size, 0

    def allocate_slots(
        self,
        request,
        num_new_tokens,
        num_new_computed_tokens=0,
        new_computed_blocks=None,
        num_lookahead_tokens=0,
        num_external_computed_tokens=0,
        delay_cache_blocks=False,
        num_encoder_tokens=0,
        full_sequence_must_fit=False,
        reserved_blocks=0,
        has_scheduled_reqs=True,
        skip_zeroing_group_ids=(),
    ):
        name = request.request_id
        computed = request.num_computed_tokens + num_new_computed_tokens
        for side in self.sides:
            side.remove_skipped_blocks(name, max(0, computed - request.num_in_flight_tokens))
        num_tokens = computed + num_new_tokens + num_lookahead_tokens
        hits = [[] for _ in self.sides] if new_computed_blocks is None else new_computed_blocks.blocks
        idle = sum(block.ref_cnt == 0 for hit in hits for block in hit)
        missing = sum(side.num_missing(name, num_tokens) - len(hit) for side, hit in zip(self.sides, hits, strict=True))
        if missing + idle > self.block_pool.get_num_free_blocks():
            return None
        if new_computed_blocks is not None:
            for side, hit in zip(self.sides, hits, strict=True):
                side.adopt(request, hit, computed)
        new = [side.allocate(name, num_tokens) for side in self.sides]
        if self.enable_caching:
            self.cache_blocks(request, min(computed + num_new_tokens, request.num_tokens))
        return KVCacheBlocks(tuple(new))

    def cache_blocks(self, request, num_computed_tokens):
        for side in self.sides:
            side.cache_blocks(request, num_computed_tokens)

    def free(self, request):
        for side in self.sides:
            self.block_pool.free_blocks(reversed(side.pop_blocks_for_free(request.request_id)))

    def pop_blocks_for_free(self, request):
        return [block for side in self.sides for block in side.pop_blocks_for_free(request.request_id)]

    def evict_blocks(self, block_ids):
        self.block_pool.evict_blocks(block_ids)

    def block_ids(self, name: str):
        return tuple([block.block_id for block in side.req_to_blocks[name]] for side in self.sides)
