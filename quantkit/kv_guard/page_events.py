"""Rarer events of a page's life, in torch operations that wait for no device; the frequent ones are kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.kv_guard.dispatch import (
    FREE_INDEX,
    HELD,
    NEVER,
    SHARED,
    SPOILED,
    Captured,
    Check,
    Expectations,
    PageTags,
    Ring,
    Word,
    twins,
)
from quantkit.kv_guard.settings import PoolSize
from quantkit.kv_guard.tracker import Held, Step

INDEX = 0xFFFF_FFFF
_MOST_PAGES = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Of whom a violation would speak: rows [N], or -1 where a node of a cache is the holder."""

    rows: Tensor | int
    step: int


def check_holder(tags: PageTags, ring: Ring, pages: Tensor, held: Held, line: Line) -> None:
    """Whoever passes pages on must hold them: what lies there is what was granted."""
    seals = twins.seal_of(held.generations, held.owners, held.indices)
    found = twins.found_words(tags, pages)
    is_other = (found[Word.FOUND_SEAL] != seals) | (tags.states_P[pages] == 0)
    twins.append_lines(ring, is_other, _holder_words(held, seals, line) | found | {Word.CHECK: Check.HOLDER})


def share_pages(tags: PageTags, pages: Tensor) -> None:
    """Written no more from here on."""
    tags.states_P.index_fill_(0, pages, SHARED)


def free_all(tags: PageTags, first_generation: int) -> None:
    """Whatever they were."""
    tags.states_P.zero_()
    pages = torch.arange(tags.num_pages, device=tags.states_P.device)
    granted = twins.generations(first_generation, len(pages), pages.device)
    twins.put_tags(tags, pages, torch.stack((granted, torch.zeros_like(granted), granted * 0 + FREE_INDEX), 1))


def reserve_pages(tags: PageTags, ring: Ring, pages: Tensor, line: Line) -> None:
    """Free pages are taken for no row; one that is held is a violation. Their tags are those that will land."""
    is_held = tags.states_P[pages] != 0
    words = {Word.STEP: line.step, Word.CHECK: Check.GRANT, Word.ROW: line.rows}
    twins.append_lines(ring, is_held, words | twins.found_words(tags, pages))
    tags.states_P.index_fill_(0, pages, HELD)


def held_by(expectations: Expectations, rows: Tensor, indices: Tensor) -> Held:
    """What rows were granted, copied."""
    details = expectations.details_RL2[rows, indices]
    return Held(generations=details[:, 0], owners=details[:, 1], indices=indices.clone())


def wire_tags(tags: PageTags, pages: Tensor, checksums: Tensor | None) -> Tensor:
    """Seal and record of pages, int64 [N, 4]; a checksum is put above the index."""
    records = tags.records_P3[pages]
    if checksums is not None:
        records[:, 2] = (records[:, 2] & INDEX) | (checksums.long() << 32)
        tags.records_P3.index_put_((pages,), records)
    return torch.cat((tags.seals_P[pages][:, None], records), 1)


def land_tags(tags: PageTags, pages: Tensor, wire: Tensor) -> None:
    """As a transfer does it: what was there is gone, and the seal keeps the mark of the page that it left."""
    tags.seals_P.index_put_((pages,), wire[:, 0])
    tags.records_P3.index_put_((pages,), wire[:, 1:])


def read_again(captured: Captured, step: Step, size: PoolSize) -> None:
    """The pages that a step read are those that its rows name now, where nothing may write them while it runs."""
    index_1L = torch.arange(step.most_pages, device=step.table.device)[None]
    columns = (index_1L * size.page_size if step.by_token else index_1L).clamp(max=step.table.shape[1] - 1)
    entries = step.table[step.rows.long()[:, None], columns]
    pages = (entries // size.page_size if step.by_token else entries).to(torch.int32)
    there = captured.pages_BL[: len(step.rows), : step.most_pages]
    there.copy_(torch.where(there == -1, there, pages))


def spoil_pages(
    tags: PageTags, expectations: Expectations, slots: Tensor, rows: Tensor, positions: Tensor, size: PoolSize
) -> None:
    """Where a token of a step does not belong it is stored all the same: the page fails from here on, whoever reads it."""
    pages, indices = slots // size.page_size, positions // size.page_size
    is_inside = (slots >= 0) & (pages != size.null_page) & (pages < tags.num_pages)
    safe = torch.where(is_inside, pages, 0)
    is_place = (indices >= 0) & (indices < size.most_pages) & (rows >= 0) & (rows < size.num_rows)
    at = torch.where(is_place, rows, 0), torch.where(is_place, indices, 0)
    seals = torch.where(is_place, expectations.seals_RL[at], NEVER)
    is_own = (tags.seals_P[safe] ^ twins.mark_of(safe) == seals) & (tags.states_P[safe] != SHARED)
    is_own &= slots % size.page_size == positions % size.page_size
    spoiled = torch.zeros(tags.num_pages + 1, dtype=torch.bool, device=pages.device)
    spoiled.index_fill_(0, torch.where(is_inside & ~is_own, safe, tags.num_pages), True)
    marks = twins.mark_of(torch.arange(tags.num_pages, device=pages.device))
    tags.seals_P.copy_(torch.where(spoiled[:-1], marks ^ SPOILED, tags.seals_P))


def unmix(x: Tensor) -> Tensor:
    """The number whose `mix` is ``x``."""
    for bits, factor in ((31, _UNDO_SECOND), (27, _UNDO_FIRST), (30, 1)):
        undone = x
        for shift in range(bits, 64, bits):
            undone = undone ^ ((x >> shift) & ((1 << (64 - shift)) - 1))
        x = undone * factor
    return x


_UNDO_FIRST = pow(0xBF58476D1CE4E5B9, -1, 1 << 64) - (1 << 64)
_UNDO_SECOND = pow(0x94D049BB133111EB, -1, 1 << 64)


def accept_arrived(
    tags: PageTags, ring: Ring, pages: Tensor, held: Held, checksums: Tensor | None, line: "Line"
) -> None:
    """Owner and index of what landed are those of the pages that were granted for it; generations are local.

    A whole tag bears the mark of some page. One that is exactly what was granted here has not been overwritten: the
    transfer has not landed. A checksum is compared with that of the tag. What is right becomes ours: its own generation
    and mark, the checksum stays. What is wrong is left as it is, and fails every check from here on.
    """
    records = tags.records_P3[pages]
    seals = twins.seal_of(held.generations, held.owners, held.indices)
    found = twins.found_words(tags, pages)
    came_from = unmix(tags.seals_P[pages] ^ twins.record_seals(records)) - twins.MARK
    is_whole = (came_from >= 0) & (came_from < _MOST_PAGES)
    is_same = (records[:, 1] == held.owners) & ((records[:, 2] & INDEX) == held.indices)
    has_come = is_whole & is_same & (found[Word.FOUND_SEAL] != seals)
    words = _holder_words(held, seals, line) | found
    twins.append_lines(ring, ~has_come, words | {Word.CHECK: Check.ARRIVAL})
    sent = (records[:, 2] >> 32) & INDEX
    is_right = has_come if checksums is None else has_come & (sent == checksums.long())
    if checksums is not None:
        twins.append_lines(
            ring, has_come & ~is_right, words | {Word.CHECK: Check.CONTENT, Word.DETAIL: checksums.long()}
        )
    ours = torch.stack((held.generations, held.owners, held.indices | (records[:, 2] & ~INDEX)), 1)
    marked = seals ^ twins.mark_of(pages)
    tags.records_P3.index_put_((pages,), torch.where(is_right[:, None], ours, records))
    tags.seals_P.index_put_((pages,), torch.where(is_right, marked, tags.seals_P[pages]))


def _holder_words(held: Held, seals: Tensor, line: "Line") -> dict[Word, Tensor | int]:
    return {
        Word.STEP: line.step,
        Word.ROW: line.rows,
        Word.INDEX: held.indices,
        Word.EXPECTED_SEAL: seals,
        Word.EXPECTED_GENERATION: held.generations,
        Word.EXPECTED_OWNER: held.owners,
    }
