"""What may look at a layer while it runs. Legend: T tokens, C input channels, I inner width, H heads, D head size."""

from typing import Protocol

from torch import Tensor

from quantkit.statistics.names import KvPart


class Observer(Protocol):
    """Called with a part of the tokens at a time, in their order, and with every token once."""

    def linear(self, module: str, inputs_TC: Tensor) -> None:
        """The input of a Linear outside the routed experts."""

    def expert(self, experts: str, number: int, inputs_TC: Tensor, inner_TI: Tensor) -> None:
        """Input of gate and up, and of down, of the tokens that chose an expert. ``experts``: ``....mlp.experts``."""

    def cache(self, attention: str, part: KvPart, values_THD: Tensor) -> None:
        """What the KV cache would hold."""
