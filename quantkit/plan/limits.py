"""What a smoke run is limited to, and what its output says of itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """``num_shards``: the first so many output shards; ``layers``: first and last, both included. None: all."""

    num_shards: int | None = None
    layers: tuple[int, int] | None = None

    @staticmethod
    def of(document: Any) -> "Limits | None":
        """The limits that a manifest's ``partial`` names; None for the manifest of a whole run. Raises ValueError."""
        if document is None:
            return None
        limits: dict[str, Any] = document if isinstance(document, dict) else {}
        num_shards, layers = limits.get("limit_shards"), limits.get("layers")
        if num_shards is None and layers is None:
            raise ValueError("partial names no limits")
        if num_shards is not None and (not _is_count(num_shards) or num_shards == 0):
            raise ValueError("limit_shards is no number of shards")
        if layers is None:
            return Limits(num_shards=num_shards)
        if not isinstance(layers, list) or len(layers) != 2 or not all(map(_is_count, layers)):
            raise ValueError("layers are no first and last layer")
        return Limits(num_shards=num_shards, layers=(layers[0], layers[1]))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """Limits, and what is left of the whole by them."""

    limits: Limits
    num_shards: int
    whole_shards: int
    num_weights: int
    whole_weights: int

    def document(self) -> dict[str, Any]:
        """``partial`` in conversion.json, in the run's document and in what commands print."""
        return {
            "limit_shards": self.limits.num_shards,
            "layers": None if self.limits.layers is None else list(self.limits.layers),
            "num_shards": self.num_shards,
            "of_num_shards": self.whole_shards,
            "num_weights": self.num_weights,
            "of_num_weights": self.whole_weights,
        }

    @staticmethod
    def of(document: Mapping[str, Any]) -> "Partial":
        """What ``document`` said. Raises KeyError or ValueError for what is none."""
        limits = Limits.of(document)
        assert limits is not None
        counts = {
            name: int(document[key])
            for name, key in (
                ("num_shards", "num_shards"),
                ("whole_shards", "of_num_shards"),
                ("num_weights", "num_weights"),
                ("whole_weights", "of_num_weights"),
            )
        }
        return Partial(limits=limits, **counts)

    @property
    def notice(self) -> str:
        """For whoever meets the output."""
        layers = self.limits.layers
        which = "" if layers is None else f"layers {layers[0]}-{layers[1]} and what lies in no layer, "
        return (
            f"partial: {which}{self.num_shards:,} of {self.whole_shards:,} shards with {self.num_weights:,} of "
            f"{self.whole_weights:,} weights; a smoke run, which is no whole model and is never published"
        )
