"""The model of a memory plan: its tensors in groups, as they lie or as a scheme would store them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from quantkit.checkpoint.file_names import CONFIG_NAME
from quantkit.checkpoint.source import Checkpoint, quantization_section
from quantkit.errors import RecipeError, SourceError
from quantkit.families import Family, family_of
from quantkit.families.config_values import integer, section
from quantkit.families.kv_shape import KvShape
from quantkit.memory.scheme import Scheme, scheme_of, store_converted, store_published
from quantkit.memory.tensor_groups import (
    TensorGroup,
    WeightGroup,
    check_layers,
    group_bound,
    group_expected,
    group_stored,
    has_counted_as_16_bits,
    is_left_out,
)
from quantkit.weights.binding import Binding, bind_checkpoint
from quantkit.weights.completeness import missing_weights, refuse_missing, surplus_weights, text_root
from quantkit.weights.source_form import SourceForm, source_form
from quantkit.weights.weight import Weight


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """``weights_from``: whether headers were counted or a config was taken at its word. ``form``: of the source.

    ``int4_group_size``: of a conversion that is given none. ``_read_stored`` and ``_read_weights`` are called once,
    when something is asked for that needs them; ``_read_remarks`` tells what was found on the way.
    """

    name: str
    config: Mapping[str, Any]
    family: Family
    form: SourceForm
    weights_from: str
    _read_stored: Callable[[], tuple[TensorGroup, ...]]
    _read_weights: Callable[[], tuple[WeightGroup, ...]]
    _read_remarks: Callable[[], tuple[str, ...]] = tuple
    int4_group_size: int = 32
    _converted: dict[Scheme, tuple[TensorGroup, ...]] = field(default_factory=dict)

    @property
    def text_config(self) -> Mapping[str, Any]:
        return self.family.text_config(self.config)

    @property
    def scheme(self) -> Scheme:
        """As it is stored."""
        return scheme_of(self.form)

    @cached_property
    def kv_shape(self) -> KvShape:
        """What a token leaves in the KV cache."""
        assert self.family.kv_shape is not None, self.family.name
        return self.family.kv_shape(self.text_config)

    @property
    def num_layers(self) -> int:
        return self.family.num_layers(self.config)

    @property
    def num_mtp_layers(self) -> int:
        return self.family.num_mtp_layers(self.config)

    def vision_count(self, key: str) -> int:
        """A number of the vision tower's config, plain or with Kimi's prefix; 0 where there is none."""
        vision = section(self.config, "vision_config") or {}
        return integer(vision, f"vt_{key}", integer(vision, key, 0))

    @property
    def max_context(self) -> int | None:
        """Tokens that the config allows a request, or None where it does not say."""
        return integer(self.text_config, "max_position_embeddings", 0) or None

    def tensors(self, scheme: Scheme) -> tuple[TensorGroup, ...]:
        """Stored tensors in a scheme: the real ones where the model is stored so already."""
        if scheme == self.scheme:
            return self._stored
        if scheme.experts == "int4" and self.form.int4_group_size not in (None, scheme.group_size):
            raise RecipeError(
                f"{self.name} is INT4 already, in groups of {self.form.int4_group_size}: it is never requantized",
                remedy=f"leave --group-size out, or give {self.form.int4_group_size}",
            )
        if scheme.rest != "bf16" and not (self.family.is_known or self.form.fp8_blocks):
            raise RecipeError(
                f"{self.name} is of an unknown family, so which of its weights an FP8 checkpoint holds is not known",
                remedy="plan it as it is stored, or with --to bf16 or --to int4",
            )
        if scheme not in self._converted:
            is_own = self.form.int4_group_size is not None
            self._converted[scheme] = store_converted(self._weights, scheme, is_own_group_size=is_own)
        return self._converted[scheme]

    @cached_property
    def remarks(self) -> tuple[str, ...]:
        """What was found on the way to the tensors."""
        return self._read_remarks()

    @cached_property
    def _stored(self) -> tuple[TensorGroup, ...]:
        return self._read_stored()

    @cached_property
    def _weights(self) -> tuple[WeightGroup, ...]:
        return self._read_weights()


def model_from_config(name: str, config: Mapping[str, Any], *, weights_from: str, int4_group_size: int = 32) -> Model:
    """What a published checkpoint of this config most likely holds. Raises SourceError for an unknown family."""
    family = family_of(config)
    if not family.is_known:
        raise SourceError(
            f"model_type {config.get('model_type')!r} is not a known family, so its tensors are not known",
            file=CONFIG_NAME,
            remedy="plan from the checkpoint directory or the hub id instead: its headers tell",
        )
    form = source_form(quantization_section(config)[1])

    @cache
    def weights() -> tuple[WeightGroup, ...]:
        return group_expected(family, family.assumed_tensors(config))

    return Model(
        name=name,
        config=config,
        family=family,
        form=form,
        weights_from=weights_from,
        _read_stored=lambda: store_published(weights(), form),
        _read_weights=weights,
        int4_group_size=int4_group_size,
    )


def model_from_checkpoint(name: str, checkpoint: Checkpoint, *, weights_from: str) -> Model:
    """What the headers say. They are read when tensors or remarks are asked for: that raises SourceError where they and
    the config contradict each other."""
    family = family_of(checkpoint.config)
    form = source_form(checkpoint.quantization)

    @cache
    def bound() -> tuple[Binding, tuple[str, ...]]:
        binding = bind_checkpoint(checkpoint, family)
        warnings, missing = missing_weights(family, checkpoint, binding)
        if missing:
            refuse_missing(missing, remedy="plan from its config.json alone, or download the rest")
        num_layers = family.num_layers(checkpoint.config) + family.num_mtp_layers(checkpoint.config)
        check_layers(family, checkpoint.tensors, num_layers, binding.dropped)
        surplus = [weight for weight in surplus_weights(family, checkpoint, binding) if not is_left_out(weight.name)]
        if surplus:
            warnings.append(_beyond_config(surplus))
        if has_counted_as_16_bits(family, checkpoint.tensors, binding.dropped):
            warnings.append("weights that are stored in FP32 or FP64 count as 16 bits, as both engines load them")
        return binding, tuple(warnings)

    def weights() -> tuple[WeightGroup, ...]:
        binding, _ = bound()
        expected = family.expected_tensors(checkpoint.config, root=text_root(binding))
        return group_bound(family, binding.weights, frozenset(tensor.name for tensor in expected if tensor.is_fp8))

    return Model(
        name=name,
        config=checkpoint.config,
        family=family,
        form=form,
        weights_from=weights_from,
        _read_stored=lambda: group_stored(family, checkpoint.tensors, bound()[0].dropped),
        _read_weights=weights,
        _read_remarks=lambda: bound()[1],
    )


def _beyond_config(weights: Sequence[Weight]) -> str:
    num_bytes = sum(weight.stored_bytes for weight in weights)
    what = (
        "1 weight that its config does not stand for is"
        if len(weights) == 1
        else (f"{len(weights)} weights that its config does not stand for are")
    )
    return f"{what} counted in full: {weights[0].name}{', ...' if len(weights) > 1 else ''}, {num_bytes:,} B in all"
