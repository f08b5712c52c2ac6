"""What a file of second moments means for the weights that become INT4."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from quantkit.importance.file import ImportanceFile
from quantkit.importance.moments import MomentReader
from quantkit.importance.names import Place
from quantkit.numerics.shrinkage import PRIOR_TOKENS

_MOST_NAMES = 20  # of a list in documents


class Cover(StrEnum):
    """How a weight is covered."""

    OWN = "own"  # by moments of its own
    RARE = "rare"  # by its own, which count less than those of its layer
    LAYER = "layer"  # by those of its layer alone
    NONE = "none"  # not at all: searched as without a file


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """A file of second moments, and what it means for a plan.

    ``places``: of the quantized weights that the file speaks of. ``cover``: weights by role and cover. ``missing``:
    weights without moments, experts of a projection together, and how many. ``unused``: entries of no weight here.
    """

    file: ImportanceFile
    places: Mapping[str, Place]
    cover: Mapping[str, Mapping[Cover, int]]
    missing: Mapping[str, int]
    unused: tuple[str, ...]

    @property
    def num_weights(self) -> int:
        return sum(sum(one.values()) for one in self.cover.values())

    def count(self, cover: Cover) -> int:
        """Weights of all roles."""
        return sum(one[cover] for one in self.cover.values())

    def reader(self) -> MomentReader:
        """For one process. Raises SourceError where the file is not there, or is another."""
        return MomentReader(self.file, self.places)

    def identity(self) -> dict[str, Any]:
        """What makes a run with another file another run."""
        return {"kind": self.file.kind, "sha256": self.file.sha256}

    def document(self) -> dict[str, Any]:
        """The file and its coverage, without a path: the same wherever it lies."""
        return {
            **self.identity(),
            "about": dict(self.file.about),
            "prior_tokens": PRIOR_TOKENS,
            "weights": {
                role: {kind.value: counts[kind] for kind in Cover} for role, counts in sorted(self.cover.items())
            },
            "missing": dict(list(self.missing.items())[:_MOST_NAMES]),
            "num_unused": len(self.unused),
            "unused": list(self.unused[:_MOST_NAMES]),
        }
