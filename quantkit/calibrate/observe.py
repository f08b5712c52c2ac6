"""Gathers the statistics of one layer while it runs."""

from torch import Tensor

from quantkit.calibrate.cache import MagnitudeCounts, cache_arrays, magnitude_counts, rows_of
from quantkit.calibrate.moments import ChannelSums, ExpertSums, channel_sums, linear_arrays
from quantkit.statistics.file import Array
from quantkit.statistics.names import KvPart


class LayerObserver:
    """Of one layer with so many routed experts. An `Observer`."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._linears: dict[str, ChannelSums] = {}
        self._experts: dict[str, ExpertSums] = {}
        self._caches: dict[tuple[str, KvPart], MagnitudeCounts] = {}

    def linear(self, module: str, inputs_TC: Tensor) -> None:
        """See `Observer`."""
        self._linears.setdefault(module, channel_sums(inputs_TC.shape[1])).add(inputs_TC)

    def expert(self, experts: str, number: int, inputs_TC: Tensor, inner_TI: Tensor) -> None:
        """See `Observer`."""
        self._experts.setdefault(experts, ExpertSums(self._num_experts)).add(number, inputs_TC, inner_TI)

    def cache(self, attention: str, part: KvPart, values_THD: Tensor) -> None:
        """See `Observer`."""
        rows = rows_of(part, values_THD)
        counts = self._caches.setdefault((attention, part), magnitude_counts(len(rows)))
        for number, values in enumerate(rows):
            counts.add(number, values)

    def arrays(self) -> dict[str, Array]:
        """Tensors of a statistics file, by name."""
        found: dict[str, Array] = {}
        for module, sums in self._linears.items():
            found |= linear_arrays(module, sums)
        for experts, expert_sums in self._experts.items():
            found |= expert_sums.arrays(experts)
        for (attention, part), counts in self._caches.items():
            found |= cache_arrays(attention, part, counts)
        return found
