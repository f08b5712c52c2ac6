"""Tensors that are alike, counted: 119,000 tensors of a model become some 1,500 groups.

A group is what differs in no way that a memory plan could see: same layer, same module, same shape, same dtype.
"""

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from quantkit.checkpoint.header import StoredTensor
from quantkit.errors import SourceError
from quantkit.families.family import ExpectedTensor, Family, Role
from quantkit.module_names import layer_of
from quantkit.tensors import BF16, F32, F64, DType, TensorSpec
from quantkit.weights.weight import Weight

_FUSED_SUFFIX = re.compile(r"(?<=_proj)_(?:weight_)?(?:scale_inv|scale|packed|shape|bias)$")
_ROTARY = ".rotary_emb."  # frequencies that both engines compute, and leave out where a checkpoint has them
# parameters that engines keep in FP32; whatever else is FP32 they load in 16 bits
_FP32_ROLES = frozenset({Role.ROUTER, Role.ROUTER_BIAS})
_WIDE = (F32, F64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tensor belongs. ``layer`` is None outside the layers; ``module`` is the module's last component."""

    layer: int | None
    module: str
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """``count`` weights before any storage format. ``is_fp8``: FP8 checkpoints of the family store them as FP8."""

    place: Place
    leaf: str
    spec: TensorSpec
    is_fp8: bool
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """``count`` stored tensors. ``has_matrix``: the last two dimensions are those of the weight, scaled down or not."""

    place: Place
    spec: TensorSpec
    count: int
    has_matrix: bool = True


StoredKind = tuple[Place, TensorSpec, bool]  # what makes two stored tensors alike; the last is ``has_matrix``


@dataclass(frozen=True, slots=True)
class _Names:
    """Places of names; a name without its expert's number is looked at once."""

    family: Family
    seen: dict[str, Place] = field(default_factory=dict)

    def place(self, name: str) -> Place:
        """Of ``....module.leaf``, or of a fused tensor, which stands in the place of its module."""
        head, separator, tail = name.partition(".experts.")  # as `expert_of`, which takes four times as long
        number, _, rest = tail.partition(".")
        key = f"{head}{separator}{rest}" if number.isdecimal() else name
        found = self.seen.get(key)
        if found is None:
            found = self.seen[key] = self._look_at(name)
        return found

    def _look_at(self, name: str) -> Place:
        module_name, _, leaf = name.rpartition(".")
        if module_name.endswith(".experts"):
            name = module_name = f"{module_name}.{_FUSED_SUFFIX.sub('', leaf)}"
        role = self.family.role_of(name)
        layer = None if role is Role.VISION else layer_of(name)  # a vision part counts layers of its own
        return Place(layer=None if layer is None else layer.number, module=module_name.rpartition(".")[2], role=role)


def group_expected(family: Family, expected: Iterable[ExpectedTensor]) -> tuple[WeightGroup, ...]:
    """Of what a config stands for."""
    names = _Names(family)
    # places are looked up and so are the same objects: to hash their identity is three times as quick
    alike: dict[tuple[int, str, DType, tuple[int, ...], bool], list[Place]] = {}
    for tensor in expected:
        place = names.place(tensor.name)
        key = (id(place), tensor.name.rpartition(".")[2], tensor.dtype, tensor.shape, tensor.is_fp8)
        alike.setdefault(key, []).append(place)
    counts: Counter[tuple[Place, str, TensorSpec, bool]] = Counter()
    for (_, leaf, dtype, shape, is_fp8), places in alike.items():
        counts[places[0], leaf, TensorSpec(dtype, shape), is_fp8] += len(places)
    return _weight_groups(counts)


def group_bound(family: Family, weights: Mapping[str, Weight], fp8_names: frozenset[str]) -> tuple[WeightGroup, ...]:
    """Of the logical weights in real headers. ``fp8_names``: what the family's FP8 checkpoints store as FP8."""
    names = _Names(family)
    counts: Counter[tuple[Place, str, TensorSpec, bool]] = Counter()
    for name, weight in weights.items():
        if is_left_out(name):
            continue
        place = names.place(name)
        is_float = weight.codec.name == "float_values"
        spec = _as_loaded(weight.stored, place) if is_float else TensorSpec(BF16, weight.shape)
        is_fp8 = weight.codec.name == "fp8_block" or name in fp8_names
        counts[place, name.rpartition(".")[2], TensorSpec(spec.dtype, weight.shape), is_fp8] += 1
    return _weight_groups(counts)


def group_stored(
    family: Family, tensors: Mapping[str, StoredTensor], dropped: Container[str] = ()
) -> tuple[TensorGroup, ...]:
    """Of real headers, as they lie; ``dropped`` is what no engine loads.

    Raises SourceError for a tensor that a known family does not have.
    """
    counts: Counter[StoredKind] = Counter()
    for tensor, place in _placed(family, tensors.values(), dropped):
        if place.role is Role.UNKNOWN and family.is_known:
            raise SourceError(
                f"is no tensor of the family {family.name}, so no engine is known to load it",
                tensor=tensor.name,
                file=tensor.path.name,
                remedy="plan from its config.json instead",
            )
        counts[place, _as_loaded(tensor, place), not tensor.name.endswith("_shape")] += 1
    return tensor_groups(counts)


def has_counted_as_16_bits(family: Family, tensors: Mapping[str, StoredTensor], dropped: Container[str] = ()) -> bool:
    """Whether real headers have a weight in FP32 or FP64 that counts as 16 bits."""
    wide = (tensor for tensor in tensors.values() if tensor.spec.dtype in _WIDE)
    return any(counts_as_16_bits(tensor, place) for tensor, place in _placed(family, wide, dropped))


def check_layers(
    family: Family, tensors: Mapping[str, StoredTensor], num_layers: int, dropped: Container[str] = ()
) -> None:
    """Raise SourceError for a tensor of a layer beyond ``num_layers``: no stage would hold it."""
    for tensor, place in _placed(family, tensors.values(), dropped):
        if place.layer is not None and place.layer >= num_layers:
            raise SourceError(
                f"lies beyond the {num_layers} layers that config.json counts",
                tensor=tensor.name,
                file=tensor.path.name,
                remedy="the config and the shards belong to different checkpoints; download both again",
            )


def counts_as_16_bits(tensor: StoredTensor, place: Place) -> bool:
    """Whether it is a weight that is stored in FP32 or FP64 and that engines load in 16 bits."""
    is_weight = tensor.spec.dtype in _WIDE and "scale" not in tensor.name.rpartition(".")[2]
    return is_weight and place.role not in _FP32_ROLES


def is_left_out(name: str) -> bool:
    """Whether no engine loads it from a checkpoint."""
    return _ROTARY in name


def _placed(
    family: Family, tensors: Iterable[StoredTensor], dropped: Container[str]
) -> Iterator[tuple[StoredTensor, Place]]:
    """What engines load of real headers."""
    names = _Names(family)
    for tensor in tensors:
        if tensor.name not in dropped and not is_left_out(tensor.name):
            yield tensor, names.place(tensor.name)


def _as_loaded(tensor: StoredTensor, place: Place) -> TensorSpec:
    return TensorSpec(BF16, tensor.spec.shape) if counts_as_16_bits(tensor, place) else tensor.spec


def tensor_groups(counts: Mapping[StoredKind, int]) -> tuple[TensorGroup, ...]:
    """One group a kind."""
    return tuple(
        TensorGroup(place=place, spec=spec, count=count, has_matrix=has_matrix)
        for (place, spec, has_matrix), count in counts.items()
    )


def by_layer(groups: Iterable[TensorGroup]) -> dict[int | None, tuple[TensorGroup, ...]]:
    """Groups by the layer that they stand in; None is outside the layers."""
    found: dict[int | None, list[TensorGroup]] = {}
    for group in groups:
        found.setdefault(group.place.layer, []).append(group)
    return {layer: tuple(of_layer) for layer, of_layer in found.items()}


def _weight_groups(counts: Mapping[tuple[Place, str, TensorSpec, bool], int]) -> tuple[WeightGroup, ...]:
    return tuple(
        WeightGroup(place=place, leaf=leaf, spec=spec, is_fp8=is_fp8, count=count)
        for (place, leaf, spec, is_fp8), count in counts.items()
    )
