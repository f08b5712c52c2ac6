"""BF16 rows -> the FP8 blocks that they were decoded from, or a refusal: nothing is rounded."""

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from quantkit.errors import RecipeError
from quantkit.numerics.fp8_recover import BLOCK, NotFromFp8Error, recover_fp8
from quantkit.transcode.rows import read_rows
from quantkit.weights.weight import Weight


def recover_rows(weight: Weight, first_row: int, last_row: int) -> Mapping[str, NDArray[Any]]:
    """``codes`` and ``scale`` of rows ``[first_row, last_row)``, which begin a block. Raises RecipeError."""
    assert first_row % BLOCK == 0, first_row
    rows = read_rows(weight, first_row, last_row)
    try:
        codes_RC, scale_BB = recover_fp8(rows.parts["values"])
    except NotFromFp8Error as error:
        row, col = error.block
        raise RecipeError(
            f"no FP8 block decodes to its BF16 from row {first_row + row * BLOCK}, column {col * BLOCK} on, so it "
            "cannot be put back exactly",
            tensor=weight.name,
            file=weight.stored.path.name,
            remedy="convert the FP8 source itself into this layout",
        ) from error
    return {"codes": codes_RC, "scale": scale_BB}
