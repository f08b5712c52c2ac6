"""What the inputs of modules were: mean square and largest magnitude of each channel, and tokens seen.

Squares are summed in float64. Legend: T tokens, C channels, I inner width, E experts.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quantkit.statistics.file import Array
from quantkit.statistics.names import ABSMAX, DOWN, GATE_UP, SECOND_MOMENT, TOKEN_COUNT


@dataclass(slots=True)
class ChannelSums:
    """Of one input. ``largest_C`` float32, ``squares_C`` float64."""

    squares_C: NDArray[np.float64]
    largest_C: NDArray[np.float32]
    num_tokens: int = 0

    def add(self, inputs_TC: Tensor) -> None:
        """Some tokens more."""
        values_TC = inputs_TC.float()
        self.squares_C += values_TC.double().square_().sum(0).cpu().numpy()
        np.maximum(self.largest_C, values_TC.abs().amax(0).cpu().numpy(), out=self.largest_C)
        self.num_tokens += len(values_TC)

    @property
    def mean_square(self) -> NDArray[np.float32]:
        with np.errstate(over="ignore"):  # infinite: refused before it is kept
            return (self.squares_C / max(self.num_tokens, 1)).astype(np.float32)


def channel_sums(width: int) -> ChannelSums:
    """Of nothing yet."""
    return ChannelSums(squares_C=np.zeros(width), largest_C=np.zeros(width, np.float32))


@dataclass(slots=True)
class ExpertSums:
    """Of the experts of one layer: input of gate and up, and of down, for each that was visited."""

    num_experts: int
    gate_up: dict[int, ChannelSums] = field(default_factory=dict)
    down: dict[int, ChannelSums] = field(default_factory=dict)

    def add(self, number: int, inputs_TC: Tensor, inner_TI: Tensor) -> None:
        """Some tokens more of one expert."""
        self.gate_up.setdefault(number, channel_sums(inputs_TC.shape[1])).add(inputs_TC)
        self.down.setdefault(number, channel_sums(inner_TI.shape[1])).add(inner_TI)

    @property
    def counts(self) -> NDArray[np.int64]:
        return np.array(
            [self.gate_up[number].num_tokens if number in self.gate_up else 0 for number in range(self.num_experts)],
            np.int64,
        )

    def arrays(self, experts: str) -> dict[str, Array]:
        """Tensors of a statistics file; rows of an expert that no token chose are zero."""
        found: dict[str, Array] = {f"{experts}{TOKEN_COUNT}": self.counts}
        for leaf, sums in ((GATE_UP, self.gate_up), (DOWN, self.down)):
            width = len(next(iter(sums.values())).squares_C)
            squares_EC = np.zeros((self.num_experts, width), np.float32)
            largest_EC = np.zeros((self.num_experts, width), np.float32)
            for number, one in sums.items():
                squares_EC[number], largest_EC[number] = one.mean_square, one.largest_C
            found |= {f"{experts}.{leaf}{SECOND_MOMENT}": squares_EC, f"{experts}.{leaf}{ABSMAX}": largest_EC}
        return found


def linear_arrays(module: str, sums: ChannelSums) -> dict[str, Array]:
    """Tensors of a statistics file for a Linear outside the experts."""
    return {
        f"{module}{SECOND_MOMENT}": sums.mean_square,
        f"{module}{ABSMAX}": sums.largest_C,
        f"{module}{TOKEN_COUNT}": np.array(sums.num_tokens, np.int64),
    }
