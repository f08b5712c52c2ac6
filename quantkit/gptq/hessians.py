"""Hessians of modules while a layer runs. Legend: T tokens, C columns of a weight (channels of its input)."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.statistics.names import KvPart


@dataclass(slots=True)
class HessianSum:
    """``sum_CC``: of ``x x^T`` in float64, a batch at a time in float32."""

    sum_CC: Tensor
    num_tokens: int = 0

    def add(self, inputs_TC: Tensor) -> None:
        """Some tokens more."""
        values_TC = inputs_TC.float()
        self.sum_CC += (values_TC.T @ values_TC).double()
        self.num_tokens += len(values_TC)

    @property
    def mean(self) -> Tensor:
        """[C, C]; zeros where no token was seen."""
        return self.sum_CC / max(self.num_tokens, 1)


def hessian_of(batches: Iterable[Tensor], width: int, device: torch.device) -> HessianSum:
    """Of all inputs in some batches [T, C]."""
    found = HessianSum(torch.zeros(width, width, dtype=torch.float64, device=device))
    for inputs_TC in batches:
        found.add(inputs_TC)
    return found


def _is_same(one: Tensor, other: Tensor) -> bool:
    """The very same numbers in memory: a view that begins there and is narrower is not."""
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


class LinearHessians:
    """Observes Linears outside the experts; those that are fed the very same tensor share a sum."""

    def __init__(self, modules: Collection[str]) -> None:
        self._modules = modules
        self._sums: dict[str, HessianSum] = {}
        self._leaders: dict[str, str] = {}
        self._last: tuple[str, Tensor] | None = None  # held, so that no other tensor can lie where it does

    def linear(self, module: str, inputs_TC: Tensor) -> None:
        """See `Observer`."""
        if module not in self._modules:
            return
        leader = self._leaders.get(module)
        if leader is None:
            leader = self._last[0] if self._last is not None and _is_same(self._last[1], inputs_TC) else module
            self._leaders[module] = leader
        if leader == module:
            width = inputs_TC.shape[1]
            zeros = torch.zeros(width, width, dtype=torch.float64, device=inputs_TC.device)
            self._sums.setdefault(module, HessianSum(zeros)).add(inputs_TC)
            self._last = (module, inputs_TC)

    def expert(self, experts: str, number: int, inputs_TC: Tensor, inner_TI: Tensor) -> None:
        """Experts are visited."""

    def cache(self, attention: str, part: KvPart, values_THD: Tensor) -> None:
        """Not needed."""

    def groups(self) -> dict[str, list[str]]:
        """Modules by the one whose sum they share."""
        found: dict[str, list[str]] = {}
        for module, leader in self._leaders.items():
            found.setdefault(leader, []).append(module)
        return found

    def mean(self, leader: str) -> Tensor:
        """[C, C]."""
        return self._sums[leader].mean
