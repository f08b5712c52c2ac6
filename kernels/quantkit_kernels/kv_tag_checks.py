"""What the ops of page tags ask of their arguments: kernels and twins refuse the same."""

import torch
from torch import Tensor

from quantkit_kernels.checks import check_devices, seen
from quantkit_kernels.kv_tag_arrays import LINE_WORDS, Captured, Expectations, PageTags, Ring


def _check_array(name: str, array: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape or not array.is_contiguous():
        raise ValueError(f"{name} is {dtype} {shape} without gaps, not {seen(array)}")


def check_tags(tags: PageTags, ring: Ring, beside: Tensor) -> None:
    """Raise ValueError for arrays of other shapes, and for those that are not where ``beside`` is."""
    num_pages = tags.num_pages
    _check_array("seals_P", tags.seals_P, torch.int64, (num_pages,))
    _check_array("records_P3", tags.records_P3, torch.int64, (num_pages, 3))
    _check_array("states_P", tags.states_P, torch.int32, (num_pages,))
    _check_array("lines_KW", ring.lines_KW, torch.int64, (len(ring.lines_KW), LINE_WORDS))
    _check_array("count_1", ring.count_1, torch.int64, (1,))
    check_devices(
        arguments=beside,
        seals_P=tags.seals_P,
        records_P3=tags.records_P3,
        states_P=tags.states_P,
        lines_KW=ring.lines_KW,
        count_1=ring.count_1,
    )


def _check_expectations(expectations: Expectations, beside: Tensor) -> tuple[int, int]:
    """Rows, and logical pages of each."""
    num_rows, row_pages = expectations.seals_RL.shape
    _check_array("seals_RL", expectations.seals_RL, torch.int64, (num_rows, row_pages))
    _check_array("details_RL2", expectations.details_RL2, torch.int64, (num_rows, row_pages, 2))
    _check_array("openings_R", expectations.openings_R, torch.int64, (num_rows,))
    check_devices(
        arguments=beside,
        seals_RL=expectations.seals_RL,
        details_RL2=expectations.details_RL2,
        openings_R=expectations.openings_R,
    )
    return num_rows, row_pages


def check_arrays(tags: PageTags, expectations: Expectations, ring: Ring, beside: Tensor) -> tuple[int, int]:
    """Rows, and logical pages of each. Raises ValueError as `check_tags` does."""
    check_tags(tags, ring, beside)
    return _check_expectations(expectations, beside)


def vectors(**given: Tensor) -> list[Tensor]:
    """Integers of equal number, without gaps. Raises ValueError for what is something else."""
    first = next(iter(given))
    for name, vector in given.items():
        if vector.dtype not in (torch.int32, torch.int64) or vector.ndim != 1:
            raise ValueError(f"{name} are int32 or int64 [{first}], not {seen(vector)}")
        if len(vector) != len(given[first]):
            raise ValueError(f"{len(vector)} {name} for {len(given[first])} {first}")
    check_devices(**given)
    return [vector.contiguous() for vector in given.values()]


def check_page_size(page_size: int) -> None:
    """Raise ValueError for one below 1."""
    if page_size < 1:
        raise ValueError(f"page_size is at least 1, not {page_size}")


def check_table(table: Tensor, rows: Tensor) -> None:
    """Raise ValueError for what is not a table of entries on the device of ``rows``; its rows may be further apart."""
    check_devices(rows=rows, table=table)
    if table.dtype not in (torch.int32, torch.int64) or table.ndim != 2 or not table.numel() or table.stride(1) != 1:
        raise ValueError(f"table is int32 or int64 [rows, entries], an entry beside the other, not {seen(table)}")


def check_room(captured: Captured, num_rows: int, most_pages: int, beside: Tensor) -> int:
    """Pages from one row to the next. Raises ValueError for arrays without room, or of another kind."""
    shape = tuple(captured.pages_BL.shape)
    _check_array("pages_BL", captured.pages_BL, torch.int32, shape)
    _check_array("seals_BL", captured.seals_BL, torch.int64, shape)
    _check_array("openings_B", captured.openings_B, torch.int64, shape[:1])
    check_devices(
        arguments=beside, pages_BL=captured.pages_BL, seals_BL=captured.seals_BL, openings_B=captured.openings_B
    )
    if len(shape) != 2 or num_rows > shape[0] or most_pages > shape[1]:
        raise ValueError(f"captured has room for {shape}, not for {num_rows} rows of {most_pages} pages")
    return shape[1]
