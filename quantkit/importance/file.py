"""A file of second moments, whatever its format: its entries, where their numbers lie, how many tokens made them.

Legend: E experts (rows), C input channels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.reader import hash_file, read_tensor
from quantkit.checkpoint.source import stamp_of
from quantkit.errors import SourceError
from quantkit.statistics.fingerprint import Fingerprint
from quantkit.tensors import F32, TensorSpec

Kind = Literal["statistics", "imatrix.gguf", "imatrix.dat"]
REMEDY = "download the file again, or make it again"
_FEW = 64  # numbers of a row
MOST_CHARACTERS = 200  # of what a file says of itself


def fail(path: Path, message: str, *, tensor: str | None = None) -> NoReturn:
    """A file that is not what it should be."""
    raise SourceError(message, tensor=tensor, file=path, remedy=REMEDY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Second moments of the input of one Linear, C numbers, or of all experts of a layer, E rows of C.

    Sums and means are alike here: only the proportions within a row count. ``tokens``: of each row, or one number for
    all of them; None where the file does not say. ``unseen``: what every number of a row is that saw no token, in a
    format that cannot say it otherwise.
    """

    values: StoredTensor
    tokens: tuple[int, ...] | None = None
    unseen: float | None = None

    @property
    def num_values(self) -> int:
        return self.values.spec.num_elements

    def read_row(self, row: int, num_cols: int) -> NDArray[np.float64]:
        """C numbers. Raises SourceError for what no second moment is."""
        stored = self.values
        moments_C = self._read(row * num_cols, (row + 1) * num_cols).astype(np.float64)
        if not np.isfinite(moments_C).all() or (moments_C < 0).any():
            where = f" in row {row}" if self.num_values > num_cols else ""
            raise SourceError(
                f"holds NaN, Inf or less than 0{where}", tensor=stored.name, file=stored.path, remedy=REMEDY
            )
        return moments_C

    def is_zero(self, row: int, num_cols: int) -> bool:
        """Whether all C numbers are 0, which weigh nothing. The first few tell it of any other row."""
        first, last = row * num_cols, (row + 1) * num_cols
        middle = min(first + _FEW, last)
        return not (self._read(first, middle).any() or self._read(middle, last).any())

    def _read(self, first: int, last: int) -> NDArray[np.float32]:
        flat = TensorSpec(F32, (self.num_values,))
        stored = StoredTensor(self.values.name, flat, self.values.path, self.values.begin)
        return read_tensor(stored.rows(first, last)).view(np.float32)

    def tokens_of(self, row: int, num_cols: int) -> int | None:
        """That made a row; None where that is not known, but some did."""
        if self.tokens is not None and (len(self.tokens) > 1 or self.num_values == num_cols or not self.tokens[0]):
            return self.tokens[row if len(self.tokens) > 1 else 0]
        is_unseen = self.unseen is not None and bool((self.read_row(row, num_cols) == self.unseen).all())
        return 0 if is_unseen else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceFile:
    """``entries`` by name; ``about``: what the file says of itself. ``stamp``: what it was known by when it was hashed.

    ``model``: fingerprint of the model that was run, where the file tells.
    """

    path: Path
    kind: Kind
    sha256: str
    stamp: str
    entries: Mapping[str, Entry]
    about: Mapping[str, str]
    model: Fingerprint | None = None

    def check_same(self) -> None:
        """Raise SourceError where another file lies there by now, or on this machine."""
        if not self.path.is_file():
            raise SourceError("is not there", file=self.path, remedy="every machine needs it, under the same path")
        if stamp_of(self.path) != self.stamp and hash_file(self.path) != self.sha256:
            raise SourceError(
                f"is another file than the plan was made with (sha256 {self.sha256[:12]}...)",
                file=self.path,
                remedy="put that one back, or convert anew",
            )
