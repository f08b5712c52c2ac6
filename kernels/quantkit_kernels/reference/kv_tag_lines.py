"""What twins and rarer events of page tags share: what lies at pages, what rows expect, and lines of violations."""

import torch
from torch import Tensor

from quantkit_kernels.kv_tag_arrays import LINE_WORDS, Expectations, PageTags, Ring, Word
from quantkit_kernels.reference.kv_seals import mark_of


def append_lines(ring: Ring, is_bad_N: Tensor, words: dict[Word, Tensor | int]) -> None:
    """A line for each entry that is bad, in their order, as long as there is room; all are counted.

    ``words`` are [N] or one number. A line that has no room goes to the ring's last, which nobody reads.
    """
    if is_bad_N.device.type == "cpu" and not is_bad_N.any():  # which on a GPU would wait for it
        return
    lines = torch.zeros(len(is_bad_N), LINE_WORDS, dtype=torch.int64, device=is_bad_N.device)
    for word, value in words.items():
        lines[:, word] = value
    at = ring.count_1 + is_bad_N.long().cumsum(0) - 1
    has_room = is_bad_N & (at < ring.num_lines)
    ring.lines_KW.index_put_((torch.where(has_room, at, ring.num_lines),), lines)
    ring.count_1.add_(is_bad_N.sum())


def is_in(numbers: Tensor, count: int) -> Tensor:
    """Numbers that an array of ``count`` has."""
    return (numbers >= 0) & (numbers < count)


def found_words(tags: PageTags, pages_N: Tensor) -> dict[Word, Tensor | int]:
    """What lies at pages, for a line; zeros, which nothing expects, for those that the pool does not have."""
    is_inside = is_in(pages_N, tags.num_pages)
    safe = torch.where(is_inside, pages_N, 0)
    records = torch.where(is_inside[:, None], tags.records_P3[safe], 0)
    return {
        Word.PAGE: pages_N,
        Word.FOUND_SEAL: torch.where(is_inside, tags.seals_P[safe] ^ mark_of(safe), 0),
        Word.FOUND_GENERATION: records[:, 0],
        Word.FOUND_OWNER: records[:, 1],
        Word.FOUND_PLACE: records[:, 2],
    }


def opening_word(expectations: Expectations, rows_N: Tensor) -> dict[Word, Tensor | int]:
    """Under which number rows are open now; 0 for those that the table does not have."""
    is_row = is_in(rows_N, len(expectations.openings_R))
    return {Word.OPENING: torch.where(is_row, expectations.openings_R[torch.where(is_row, rows_N, 0)], 0)}


def is_place(expectations: Expectations, rows: Tensor, indices: Tensor) -> Tensor:
    """Rows and logical pages that expectations have."""
    return is_in(rows, len(expectations.seals_RL)) & is_in(indices, expectations.seals_RL.shape[1])


def expected_words(
    expectations: Expectations, rows_N: Tensor, indices_N: Tensor, seals_N: Tensor
) -> dict[Word, Tensor | int]:
    """Of whom a line speaks, and what that row expects."""
    is_known = is_place(expectations, rows_N, indices_N)
    details = expectations.details_RL2[torch.where(is_known, rows_N, 0), torch.where(is_known, indices_N, 0)]
    return {
        Word.ROW: rows_N,
        Word.INDEX: indices_N,
        Word.EXPECTED_SEAL: seals_N,
        Word.EXPECTED_GENERATION: torch.where(is_known, details[:, 0], 0),
        Word.EXPECTED_OWNER: torch.where(is_known, details[:, 1], 0),
    }
