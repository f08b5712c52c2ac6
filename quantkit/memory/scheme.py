"""How the weights are to be stored: as they lie, or as a target format would store them."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from quantkit.checkpoint.file_names import CONFIG_NAME
from quantkit.engines.mixed import NATIVE_FP8_ROLES, keeps_fp8
from quantkit.engines.parallel import ENGINES
from quantkit.errors import RecipeError, SourceError
from quantkit.families.family import Role
from quantkit.layouts import compressed_tensors as ct
from quantkit.memory.tensor_groups import Place, StoredKind, TensorGroup, WeightGroup, tensor_groups
from quantkit.tensors import BF16, F16, I32, I64, DType, TensorSpec
from quantkit.weights.source_form import SourceForm
from quantkit.weights.stored import is_quantizable, stored_leaves

Format = Literal["fp8", "bf16", "int4"]
Rest = Literal["bf16", "fp8", "fp8-native"]
RESTS: tuple[Rest, ...] = ("bf16", "fp8", "fp8-native")
FORMATS: tuple[Format, ...] = ("fp8", "bf16", "int4")
GROUP_SIZES = (32, 64, 128)
FP8_BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """``rest``: what FP8 checkpoints of the family hold as FP8 and ``experts`` does not speak of; beside INT4, ``fp8``
    is what both engines load so, and ``fp8-native`` every Linear.

    ``group_size`` is set where experts are INT4.
    """

    experts: Format
    rest: Rest
    group_size: int | None = None

    def __post_init__(self) -> None:
        assert (self.experts == "int4") == (self.group_size is not None), self
        assert self.experts in ("int4", self.rest), self

    def __str__(self) -> str:
        if self.experts == "int4":
            rest = "native FP8" if self.rest == "fp8-native" else self.rest.upper()
            return f"INT4 experts in groups of {self.group_size}, rest {rest}"
        return self.experts.upper()

    @property
    def form(self) -> SourceForm:
        """Of a checkpoint stored so: FP8 in blocks of 128 x 128, INT4 in compressed-tensors layout."""
        blocks = () if self.rest == "bf16" else ((FP8_BLOCK, FP8_BLOCK),)
        return SourceForm(fp8_blocks=blocks, int4_group_size=self.group_size)


def scheme_of(form: SourceForm) -> Scheme:
    """What a checkpoint of this source form is."""
    rest: Literal["fp8", "bf16"] = "fp8" if form.fp8_blocks else "bf16"
    if form.int4_group_size is not None:
        return Scheme(experts="int4", rest=rest, group_size=form.int4_group_size)
    return Scheme(experts=rest, rest=rest)


def store_published(groups: Iterable[WeightGroup], form: SourceForm) -> tuple[TensorGroup, ...]:
    """The tensors of a published checkpoint."""
    return _store(groups, form, I32, is_own_group_size=True)


def store_converted(
    groups: Iterable[WeightGroup], scheme: Scheme, *, is_own_group_size: bool = False
) -> tuple[TensorGroup, ...]:
    """The tensors of a converted checkpoint: FP16 has become BF16, FP32 has stayed.

    ``is_own_group_size``: that of the scheme is the source's, as its config says.
    """
    as_bf16 = (
        WeightGroup(
            place=group.place,
            leaf=group.leaf,
            spec=TensorSpec(BF16, group.spec.shape) if group.spec.dtype == F16 else group.spec,
            is_fp8=group.is_fp8 and _stays_fp8(group.place, scheme),
            count=group.count,
        )
        for group in groups
    )
    return _store(as_bf16, scheme.form, I64, is_own_group_size=is_own_group_size)


def _stays_fp8(place: Place, scheme: Scheme) -> bool:
    """What ``convert`` leaves in FP8 beside INT4 experts: for both engines, or natively."""
    if scheme.experts != "int4":
        return True
    return (
        place.role in NATIVE_FP8_ROLES if scheme.rest == "fp8-native" else keeps_fp8(place.module, place.role, ENGINES)
    )


def _store(
    groups: Iterable[WeightGroup], form: SourceForm, shape_dtype: DType, *, is_own_group_size: bool
) -> tuple[TensorGroup, ...]:
    counts: Counter[StoredKind] = Counter()
    for group in groups:
        _check_groups(group, form.int4_group_size, is_own=is_own_group_size)
        for leaf, spec in stored_leaves(
            group.leaf, group.spec, form, role=group.place.role, is_fp8=group.is_fp8, shape_dtype=shape_dtype
        ):
            counts[group.place, spec, leaf != ct.SHAPE] += group.count
    return tensor_groups(counts)


def _check_groups(group: WeightGroup, group_size: int | None, *, is_own: bool) -> None:
    """Raise where experts are no whole number of scale groups wide: SourceError where the source's config has the size,
    else RecipeError."""
    if group_size is None or group.place.role is not Role.ROUTED_EXPERT or not is_quantizable(group.leaf, group.spec):
        return
    if group.spec.shape[-1] % group_size == 0:
        return
    message = (
        f"{group.place.module} of the experts has {group.spec.shape[-1]} columns, which groups of {group_size} do not "
        "divide"
    )
    if is_own:
        raise SourceError(message, file=CONFIG_NAME, remedy="take config.json from the INT4 source again")
    raise RecipeError(message, remedy="give a --group-size that divides them")
