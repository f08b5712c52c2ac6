"""What bench_kernels.py times: each case with its inputs, the bytes that it must move, and other ways of doing it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from bench_goals import (
    BF16,
    BF16_ROWS,
    USUAL,
    Goal,
    decode_goals,
    dense_goals,
    expert_goals,
    requantize_goals,
    store_goals,
    tag_goals,
)
from bench_others import decode_experts, decoded_experts, eager_absmax, eager_store, grouped_experts
from naive_w4a16 import naive_gemm, naive_moe
from torch import Tensor

from quantkit_kernels import int4_gemm, int4_moe, kv_tags, mla_decode, quantize_kv_mla, reference, repack
from quantkit_kernels.gemm import dequantize
from quantkit_kernels.kv_tag_arrays import new_captured, new_expectations, new_ring, new_tags
from quantkit_kernels.requantize import Source, quantize

GROUP = 32
LEAST_BYTES = 300e6  # of weights that are used in turns
SPARE_CALLS = 20  # calls with routing of their own
DECODED = "decode, then BF16"


@dataclass(frozen=True)
class Case:
    """``call`` and ``others`` take the number of the call, which chooses among inputs."""

    name: str
    num_bytes: int
    call: Callable[[int], object]
    others: dict[str, Callable[[int], object]] = field(default_factory=dict)
    goals: tuple[Goal, ...] = ()


@dataclass(frozen=True)
class Sizes:
    """Of GLM-5.2 and Kimi-K2 on eight GPUs; ``small`` for a look at whether everything runs."""

    dense: tuple[tuple[int, int], ...] = ((16384, 8192), (6144, 16384))  # rows, columns: 64 and 48 MB packed
    moe: tuple[tuple[str, int, int, int], ...] = (("glm-5.2", 256, 6144, 256), ("kimi-k2", 384, 7168, 256))
    contexts: tuple[int, ...] = (8192, 32768)
    sequences: tuple[int, ...] = (1, 8, 32, 64)
    heads: tuple[int, ...] = (8, 16)
    tagged: tuple[tuple[int, int], ...] = ((64, 8192), (64, 32768))  # requests, tokens of each
    requantized: tuple[int, int] = (8192, 16384)
    least_bytes: float = LEAST_BYTES

    @staticmethod
    def small() -> "Sizes":
        return Sizes(
            dense=((64, 256),),
            moe=(("small", 4, 128, 64),),
            contexts=(128,),
            sequences=(2,),
            heads=(8,),
            tagged=((2, 128),),
            requantized=(4, 128),
            least_bytes=1,
        )


def cases_of(kinds: list[str], tokens: list[int], sizes: Sizes, device: str) -> Iterator[Case]:
    """Every case of the kinds, one after the other: only one has its inputs in memory."""
    if "dense" in kinds:
        for (num_rows, num_cols), num_tokens in product(sizes.dense, tokens):
            yield dense_case(num_rows, num_cols, num_tokens, sizes, device)
    if "moe" in kinds:
        for model, num_tokens in product(sizes.moe, tokens):
            yield moe_case(model, num_tokens, sizes, device)
    if "store" in kinds:
        for layout, num_tokens in product(("flat576", "dsa656"), tokens):
            yield store_case(layout, num_tokens, device)
    if "mla" in kinds:
        yield from mla_cases(sizes, device)
    if "tags" in kinds:
        for (num_requests, context), is_token in product(sizes.tagged, (False, True)):
            yield from tag_cases(num_requests, context, by_token=is_token, device=device)
    if "requantize" in kinds:
        for scales in ("absmax", "search"):
            yield requantize_case(scales, sizes, device)


def random_int4(shape: tuple[int, ...], device: str) -> tuple[Tensor, Tensor]:
    """Random codes, scales of both signs, as a checkpoint stores them."""
    words = torch.randint(-(2**31), 2**31 - 1, (*shape[:-1], shape[-1] // 8), dtype=torch.int32, device=device)
    scale = torch.randn((*shape[:-1], shape[-1] // GROUP), device=device).to(torch.bfloat16) / 100
    return words, scale


def int4_bytes(num_weights: int) -> int:
    return num_weights // 2 + 2 * num_weights // GROUP


def dense_case(num_rows: int, num_cols: int, num_tokens: int, sizes: Sizes, device: str) -> Case:
    num_sets = max(1, -(-int(sizes.least_bytes) // int4_bytes(num_rows * num_cols)))
    stored = [random_int4((num_rows, num_cols), device) for _ in range(num_sets)]
    tiles = [repack(*one, group_size=GROUP) for one in stored]
    plain = [dequantize(one, num_cols=num_cols, group_size=GROUP) for one in tiles]
    x = torch.randn((num_tokens, num_cols), device=device).to(torch.bfloat16)

    def by_library(i: int) -> Tensor:
        return x @ dequantize(tiles[i % num_sets], num_cols=num_cols, group_size=GROUP).mT

    return Case(
        name=f"dense {num_rows} x {num_cols}, M {num_tokens}",
        num_bytes=int4_bytes(num_rows * num_cols) + 2 * num_tokens * (num_rows + num_cols),
        call=lambda i: int4_gemm(x, *tiles[i % num_sets], group_size=GROUP),
        others={
            BF16: lambda i: x @ plain[i % num_sets].mT,
            DECODED: by_library,
            USUAL: lambda i: naive_gemm(x, *stored[i % num_sets], group_size=GROUP),
        },
        goals=dense_goals(num_rows, num_cols, num_tokens),
    )


def moe_case(model: tuple[str, int, int, int], num_tokens: int, sizes: Sizes, device: str) -> Case:
    name, num_experts, num_cols, width = model
    one_layer = int4_bytes(num_experts * 3 * num_cols * width)
    num_sets = max(2 if num_experts > 8 else 1, -(-int(sizes.least_bytes) // one_layer))
    stored = [
        (
            random_int4((num_experts, 2 * width, num_cols), device),
            random_int4((num_experts, num_cols, width), device),
        )
        for _ in range(num_sets)
    ]
    tiles = [(*repack(*gate_up, group_size=GROUP), *repack(*down, group_size=GROUP)) for gate_up, down in stored]
    plain = [(decode_experts(gate_up, GROUP), decode_experts(down, GROUP)) for gate_up, down in stored]
    top_k = min(8, num_experts)
    x = torch.randn((num_tokens, num_cols), device=device).to(torch.bfloat16)
    chances = torch.rand((SPARE_CALLS, num_tokens, num_experts), device=device)
    weights, ids = chances.topk(top_k, dim=-1)
    chosen = sum(len(one.unique()) for one in ids) / SPARE_CALLS

    def router(i: int) -> tuple[Tensor, Tensor]:
        return weights[i % SPARE_CALLS], ids[i % SPARE_CALLS]

    return Case(
        name=f"experts of {name}, M {num_tokens}",
        num_bytes=int(int4_bytes(3 * num_cols * width) * chosen) + 4 * num_tokens * num_cols,
        call=lambda i: int4_moe(x, *tiles[i % num_sets], *router(i), group_size=GROUP),
        others={
            BF16: lambda i: grouped_experts(x, *plain[i % num_sets], *router(i)),
            DECODED: lambda i: decoded_experts(x, *stored[i % num_sets], *router(i), group_size=GROUP),
            USUAL: lambda i: naive_moe(x, *stored[i % num_sets], *router(i)),
        },
        goals=expert_goals(name, num_tokens),
    )


def store_case(layout: Any, num_tokens: int, device: str) -> Case:
    latent = torch.randn((num_tokens, 512), device=device).to(torch.bfloat16)
    rope = torch.randn((num_tokens, 64), device=device).to(torch.bfloat16)
    row_bytes = {"flat576": 576, "dsa656": 656}[layout]
    cache = torch.zeros((max(num_tokens, 64) * 4, row_bytes), dtype=torch.uint8, device=device)
    slots = torch.randperm(len(cache), device=device)[:num_tokens]
    return Case(
        name=f"store {layout}, {num_tokens} tokens",
        num_bytes=num_tokens * (1152 + row_bytes),
        call=lambda _: quantize_kv_mla(latent, rope, slots, cache, layout=layout),
        others={"torch": lambda _: eager_store(latent, rope, slots, cache, layout=layout)},
        goals=store_goals(num_tokens),
    )


def random_rows(shape: tuple[int, ...], device: str) -> Tensor:
    """Rows of a cache without NaN: the bit of a byte that is off is the exponent's highest in each of its formats."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device).bitwise_and_(0xBF)


def mla_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    page_size = 64
    rows = (("bf16", 1152), ("flat576", 576), ("dsa656", 656))
    for context, num_seqs, num_heads in product(sizes.contexts, sizes.sequences, sizes.heads):
        calls = {}
        for layout, row_bytes in rows:
            num_pages = num_seqs * context // page_size
            num_sets = -(-int(sizes.least_bytes) // (num_pages * page_size * row_bytes))
            shape = (num_sets, num_pages, page_size, row_bytes)
            caches = random_rows(shape, device)
            pages = torch.randperm(num_pages, device=device).to(torch.int32).reshape(num_seqs, -1)
            q = torch.randn((num_seqs, num_heads, 576), device=device).to(torch.bfloat16)
            lengths = torch.full((num_seqs,), context, dtype=torch.int32, device=device)
            calls[layout] = _decode_call(q, caches, pages, lengths, layout)
        for layout, row_bytes in rows:
            yield Case(
                name=f"decode {layout}, {num_seqs} x {context}, {num_heads} heads",
                num_bytes=num_seqs * context * row_bytes,
                call=calls[layout],
                others={} if layout == "bf16" else {BF16_ROWS: calls["bf16"]},
                goals=decode_goals(layout, num_seqs, context),
            )


def _decode_call(q: Tensor, caches: Tensor, pages: Tensor, lengths: Tensor, layout: Any) -> Callable[[int], object]:
    return lambda i: mla_decode(q, caches[i % len(caches)], pages, lengths, softmax_scale=0.06, layout=layout)


def tag_cases(num_requests: int, context: int, *, by_token: bool, device: str) -> Iterator[Case]:
    """The checks before and behind a step. Each call has requests and pages of its own, all of one pool."""
    page_size, row_pages = 64, context // 64
    num_rows = SPARE_CALLS * num_requests
    places = torch.arange(num_rows * row_pages, device=device)
    pages = torch.randperm(len(places), device=device)
    tags, expectations = new_tags(len(pages), device), new_expectations(num_rows, row_pages, device)
    ring = new_ring(1024, device)
    granted = (pages, places // row_pages, places % row_pages, places)
    kv_tags.grant_pages(tags, expectations, ring, *granted, first_generation=1, step=0)
    table = pages.view(num_rows, row_pages)
    if by_token:
        table = (table[:, :, None] * page_size + torch.arange(page_size, device=device)).flatten(1)
    table = table.to(torch.int32)
    rows = torch.arange(num_rows, device=device).view(SPARE_CALLS, num_requests)
    lengths = torch.full((num_requests,), context, dtype=torch.int32, device=device)
    captured = [new_captured(num_requests, row_pages, device) for _ in rows]

    def before(module: Any, i: int) -> None:
        at, sizes = i % SPARE_CALLS, {"page_size": page_size, "most_pages": row_pages}
        batch = (table, rows[at], lengths)
        module.check_pages(tags, expectations, ring, *batch, **sizes, by_token=by_token, step=i, captured=captured[at])

    def behind(module: Any, i: int) -> None:
        at = i % SPARE_CALLS
        module.check_captured(tags, expectations, ring, captured[at], rows[at], most_pages=row_pages, step=i)

    for i in range(SPARE_CALLS):
        before(reference, i)
    checks = [("by token" if by_token else "by page", before, (32 if by_token else 4) + 8 + 8 + 12)]
    checks += [] if by_token else [("behind the step", behind, 12 + 8)]
    for when, check, page_bytes in checks:
        yield Case(
            name=f"tags of {num_requests} x {context}, {when}",
            num_bytes=num_requests * row_pages * page_bytes,
            call=partial(check, kv_tags),
            others={"torch": partial(check, reference)},
            goals=tag_goals(num_requests * row_pages),
        )


def requantize_case(scales: Any, sizes: Sizes, device: str) -> Case:
    num_rows, num_cols = sizes.requantized
    codes = torch.randint(0, 0x7F, (num_rows, num_cols), dtype=torch.uint8, device=device)
    source = Source(codes, torch.ones((-(-num_rows // 128), -(-num_cols // 128)), device=device))
    return Case(
        name=f"requantize {num_rows} x {num_cols}, {scales}",
        num_bytes=num_rows * num_cols + int4_bytes(num_rows * num_cols),
        call=lambda _: quantize(source, group_size=GROUP, scales=scales, signed=True),
        others={"torch": lambda _: eager_absmax(source, group_size=GROUP)} if scales == "absmax" else {},
        goals=requantize_goals(scales),
    )
