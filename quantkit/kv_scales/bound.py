"""A proof from weights alone that scale 1.0 cannot clip a latent row.

The latent is RMS-normed: ``y = gain * x / sqrt(mean(x^2) + eps)``, and no element of x is larger than the root of the
sum of all squares, so ``|y| <= sqrt(C) * max |gain|`` whatever x is. Arithmetic adds to that: the normed value and the
product are each rounded to BF16 (up to 2**-8 of themselves), and C squares in FP32 add up to C * 2**-24.
The rope part of the row is not normed: only data bounds it. C: channels of the latent.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from quantkit.checkpoint.reader import read_tensor
from quantkit.families.config_values import Config
from quantkit.families.family import Family
from quantkit.families.kv_shape import LatentKv
from quantkit.module_names import layer_name
from quantkit.numerics.fp8 import E4M3_MAX
from quantkit.tensors import BF16, F16, F32
from quantkit.weights.binding import Binding
from quantkit.weights.completeness import text_root
from quantkit.weights.weight import Weight

_BF16_ROUNDING, _FP32_ROUNDING = 2.0**-8, 2.0**-24


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentBound:
    """No element of the latent of this layer is beyond ``bound``. ``gain``: the largest magnitude of the norm's."""

    layer: int
    tensor: str
    gain: float
    bound: float

    @property
    def is_safe(self) -> bool:
        """Whether scale 1.0 cannot clip it."""
        return self.bound <= E4M3_MAX


def latent_bounds(binding: Binding, family: Family, config: Config, shape: LatentKv) -> Iterator[LatentBound]:
    """Of every layer, the draft's where it is there; nothing for a family whose norm is not known.

    Raises SourceError for a gain that is missing, or no number.
    """
    if not family.is_known:
        return
    first_mtp = family.num_layers(config)
    root = text_root(binding)
    for layer in range(first_mtp + family.num_mtp_layers(config)):
        name = f"{layer_name(root, layer)}.self_attn.kv_a_layernorm.weight"
        weight = binding.weights.get(name)
        if weight is not None:
            gain = _largest(weight)
            yield LatentBound(layer=layer, tensor=weight.stored.name, gain=gain, bound=bound_of(gain, shape.latent_dim))


def bound_of(gain: float, channels: int) -> float:
    """Of a latent of so many channels, whose norm has this largest gain."""
    rounding = (1 + _BF16_ROUNDING) ** 2 * (1 + (channels + 16) * _FP32_ROUNDING)
    return float(np.sqrt(channels)) * gain * rounding


def _largest(weight: Weight) -> float:
    if weight.stored.spec.dtype not in (BF16, F16, F32):
        weight.fail(f"is {weight.stored.spec}, and the gain of a norm is made of floats")
    values = weight.codec.decode({weight.main: read_tensor(weight.stored)}, 0)
    if not np.isfinite(values).all():
        weight.fail("holds a NaN or an infinity")
    return float(np.abs(values).max(initial=0.0))
