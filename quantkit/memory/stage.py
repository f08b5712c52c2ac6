"""The stages of a pipeline: which layers each holds, and what stands before and behind them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quantkit.engines.parallel import stage_layers
from quantkit.families.config_values import flag
from quantkit.families.family import Role
from quantkit.memory.engine_rules import EngineRules
from quantkit.memory.model import Model
from quantkit.memory.serving import MemoryRequest
from quantkit.memory.tensor_groups import Place, TensorGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Decoder layers ``[first, last)`` of ``num_layers``, and what stands before and behind them.

    ``num_mtp``: MTP layers that are loaded here, on the last stage. ``has_head``: the engine builds the head here, out
    of the embedding where the two are tied.
    """

    index: int
    first: int
    last: int
    num_layers: int
    num_mtp: int = 0
    has_head: bool = True
    is_tied: bool = False

    @property
    def num_own(self) -> int:
        """Decoder layers of this stage."""
        return self.last - self.first

    @property
    def is_last(self) -> bool:
        return self.last == self.num_layers

    def held(self, groups: Mapping[int | None, tuple[TensorGroup, ...]]) -> Iterator[TensorGroup]:
        """What the stage loads of groups by layer."""
        for layer in (*range(self.first, self.last), *range(self.num_layers, self.num_layers + self.num_mtp)):
            yield from groups.get(layer, ())
        yield from (group for group in groups.get(None, ()) if self._holds_outside(group.place))

    def _holds_outside(self, place: Place) -> bool:
        """Of what stands in no layer. The MTP layer wants the embedding too; a vision tower is loaded by all."""
        if place.role is Role.VISION:
            return True
        if place.role is Role.EMBEDDING:
            return self.first == 0 or self.num_mtp > 0 or (self.is_tied and self.has_head)
        return self.has_head and not self.is_tied if place.role is Role.HEAD else self.is_last


def stages(model: Model, request: MemoryRequest, rules: EngineRules) -> tuple[Stage, ...]:
    """The pipeline's stages."""
    num_layers = model.num_layers
    return tuple(
        Stage(
            index=index,
            first=first,
            last=last,
            num_layers=num_layers,
            num_mtp=model.num_mtp_layers if request.with_mtp and last == num_layers else 0,
            has_head=last == num_layers or model.family.name in rules.heads_everywhere,
            is_tied=flag(model.text_config, "tie_word_embeddings", False),
        )
        for index, (first, last) in enumerate(stage_layers(num_layers, request.parallel.pp, request.engine))
    )
