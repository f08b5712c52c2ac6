"""Routed experts, one in memory at a time, over the tokens of all sequences that chose them.

Legend: T tokens, K experts a token, C hidden size, I inner width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantkit.streaming.ahead import ahead
from quantkit.streaming.decode import decode_weight
from quantkit.streaming.devices import named_memory_errors
from quantkit.streaming.observer import Observer
from quantkit.streaming.own_errors import OwnErrors
from quantkit.weights.weight import Weight

ROWS_AT_ONCE = 4096  # tokens of one expert


@dataclass(slots=True, kw_only=True)
class Routing:
    """What a layer sent to its experts: input, chosen experts, and what each answer is multiplied by."""

    inputs_TC: Tensor
    chosen_TK: Tensor
    factors_TK: Tensor


@dataclass(slots=True, kw_only=True)
class ExpertVisit:
    """One expert while it is in memory. Weights may be replaced before they are used.

    ``rows_T``: its tokens in order; ``factors_T``: theirs.
    """

    experts: str
    number: int
    weights: dict[str, Tensor]  # gate, up [I, C], down [C, I]
    activation: Callable[[Tensor], Tensor]
    routing: Routing
    rows_T: Tensor
    factors_T: Tensor

    def inputs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Places of some of its tokens and their input [T, C]."""
        for rows_T in torch.split(self.rows_T, ROWS_AT_ONCE):
            yield rows_T, self.routing.inputs_TC[rows_T].to(self.weights["gate"])

    def inner(self, inputs_TC: Tensor) -> Tensor:
        """[T, I] the input of down."""
        gate_TI = F.linear(inputs_TC, self.weights["gate"])
        return self.activation(gate_TI) * F.linear(inputs_TC, self.weights["up"])


Visit = Callable[[ExpertVisit], None]


class Recorder(nn.Module):
    """Stands where the experts were while the rest of a layer runs: keeps what they are asked, and answers zeros."""

    def __init__(self, routing: Routing, own: OwnErrors) -> None:
        super().__init__()
        self._routing, self._own = routing, own
        self.first = 0

    def forward(self, hidden_TC: Tensor, chosen_TK: Tensor, factors_TK: Tensor) -> Tensor:
        """As transformers' experts are called."""
        rows = slice(self.first, self.first + len(hidden_TC))
        with self._own.noted():
            self._routing.inputs_TC[rows] = hidden_TC
            self._routing.chosen_TK[rows] = chosen_TK
            self._routing.factors_TK[rows] = factors_TK
        return torch.zeros_like(hidden_TC)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """Where the experts of a layer lie. ``weights``: for each expert gate, up and down."""

    name: str
    weights: tuple[dict[str, Weight], ...]
    activation: Callable[[Tensor], Tensor]

    def answer(
        self,
        routing: Routing,
        into_TC: Tensor,
        *,
        device: torch.device,
        dtype: torch.dtype,
        observer: Observer | None,
        visit: Visit | None,
    ) -> None:
        """Add the answers of all experts to ``into_TC``, expert by expert in order.

        ``visit`` sees every expert before it is used, also one that no token chose. Raises ResourceError where memory
        ends, with the expert.
        """
        chosen_TK = routing.chosen_TK
        hit = torch.bincount(chosen_TK.reshape(-1), minlength=len(self.weights)).tolist()
        numbers = [number for number, count in enumerate(hit) if count or visit is not None]
        # no zip: it would hold on to an expert while the one after the next is loaded
        for number, weights in ahead(partial(self._load, number, device, dtype) for number in numbers):
            rows_T, places_T = torch.where(chosen_TK == number)
            one = ExpertVisit(
                experts=self.name,
                number=number,
                weights=weights,
                activation=self.activation,
                routing=routing,
                rows_T=rows_T,
                factors_T=routing.factors_TK[rows_T, places_T],
            )
            with named_memory_errors(self._name_of(number)):
                if visit is not None:
                    visit(one)
                _add_answers(one, into_TC, observer)
            del one, weights  # before the one after the next is loaded

    def _load(self, number: int, device: torch.device, dtype: torch.dtype) -> tuple[int, dict[str, Tensor]]:
        with named_memory_errors(self._name_of(number)):
            return number, {part: decode_weight(one).to(device, dtype) for part, one in self.weights[number].items()}

    def _name_of(self, number: int) -> str:
        return f"{self.name}.{number}"


def _add_answers(one: ExpertVisit, into_TC: Tensor, observer: Observer | None) -> None:
    first = 0
    for rows_T, inputs_TC in one.inputs():
        inner_TI = one.inner(inputs_TC)
        if observer is not None:
            observer.expert(one.experts, one.number, inputs_TC, inner_TI)
        factors_T1 = one.factors_T[first : first + len(rows_T), None].to(inner_TI.device)
        answer_TC = F.linear(inner_TI, one.weights["down"]) * factors_T1
        into_TC.index_add_(0, rows_T, answer_TC.to(into_TC.device, into_TC.dtype))
        first += len(rows_T)
