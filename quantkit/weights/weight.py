"""A logical weight and the stored parts that it is made of."""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple, NoReturn

from quantkit.checkpoint.header import StoredTensor
from quantkit.codecs.codec import Codec
from quantkit.codecs.opaque import NativeInt4
from quantkit.errors import SourceError


class Weight(NamedTuple):
    """``name`` is the logical name (``....gate_proj.weight``), ``parts`` where its stored tensors lie.

    The part called ``main`` has the weight's rows; every other part is small and read whole. A weight of any rank
    counts as a matrix whose last dimension is the columns.
    """

    name: str
    shape: tuple[int, ...]
    codec: Codec
    main: str
    parts: Mapping[str, StoredTensor]

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def is_matrix(self) -> bool:
        """Whether this may be the weight of a Linear."""
        return len(self.shape) == 2 and self.name.endswith(".weight")

    @property
    def is_native_int4(self) -> bool:
        return isinstance(self.codec, NativeInt4)

    @property
    def num_rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def num_cols(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def stored_bytes(self) -> int:
        return sum(part.spec.num_bytes for part in self.parts.values())

    @property
    def stored(self) -> StoredTensor:
        return self.parts[self.main]

    def fail(self, message: str, *, part: str | None = None, remedy: str = "download this shard again") -> NoReturn:
        """Raise a SourceError that names the tensor and file of a part, of the main one where none is named."""
        stored = self.stored if part is None else self.parts[part]
        raise SourceError(message, tensor=stored.name, file=stored.path.name, remedy=remedy)
