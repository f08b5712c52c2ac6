"""Rarer events of a page's life, in torch operations that wait for no device; the frequent ones are kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.kv_guard.dispatch import (
    FREE_INDEX,
    HELD,
    MARK,
    NEVER,
    SHARED,
    Check,
    Expectations,
    PageTags,
    Ring,
    Word,
    twins,
)
from quantkit.kv_guard.tracker import Held

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


def grant_unbound(tags: PageTags, ring: Ring, pages: Tensor, line: Line) -> None:
    """Free pages are taken for no row; one that is held is a violation."""
    is_held = tags.states_P[pages] != 0
    words = {Word.STEP: line.step, Word.CHECK: Check.GRANT, Word.ROW: line.rows}
    twins.append_lines(ring, is_held, words | twins.found_words(tags, pages))
    tags.states_P.index_fill_(0, pages, SHARED)


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
    came_from = unmix(tags.seals_P[pages] ^ twins.record_seals(records)) - MARK
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


def spoil(tags: PageTags, expectations: Expectations, pages: Tensor) -> Tensor:
    """Give pages a seal that nothing expects; returns the rows that expect them, bool [R]."""
    unmarked = tags.seals_P[pages] ^ twins.mark_of(pages)
    tags.seals_P.index_put_((pages,), twins.mark_of(pages) ^ NEVER)
    return torch.isin(expectations.seals_RL, unmarked[unmarked != NEVER]).any(1)


def own_pages(tags: PageTags, expectations: Expectations, seals: Tensor, pages: Tensor) -> Tensor:
    """Of places that expect ``seals`` and are named ``pages``, which pages are theirs: int64 [N], -1 where none is.

    The page that is named, if it is what is expected; else whichever is; else, again, the one that is named, if it is
    held and its tag is expected by no row: what lies there was written over it.
    """
    unmarked = tags.seals_P ^ twins.mark_of(torch.arange(tags.num_pages, device=pages.device))
    ordered, order = unmarked.sort()
    at = torch.searchsorted(ordered, seals).clamp(max=tags.num_pages - 1)
    is_granted = seals != NEVER
    is_somewhere = is_granted & (ordered[at] == seals) & (tags.states_P[order[at]] != 0)
    is_inside = (pages >= 0) & (pages < tags.num_pages)
    named = torch.where(is_inside, pages, 0)
    is_expected = (unmarked[named] != NEVER) & torch.isin(unmarked[named], expectations.seals_RL)
    is_nobodys = is_granted & (tags.states_P[named] == HELD) & ~is_expected
    elsewhere = torch.where(is_somewhere, order[at], torch.where(is_inside & is_nobodys, pages, -1))
    return torch.where(is_granted & is_inside & (unmarked[named] == seals), pages, elsewhere)


def _holder_words(held: Held, seals: Tensor, line: "Line") -> dict[Word, Tensor | int]:
    return {
        Word.STEP: line.step,
        Word.ROW: line.rows,
        Word.INDEX: held.indices,
        Word.EXPECTED_SEAL: seals,
        Word.EXPECTED_GENERATION: held.generations,
        Word.EXPECTED_OWNER: held.owners,
    }
