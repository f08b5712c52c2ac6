"""Which model a checkpoint is, whatever the format of its weights: what is never quantized tells it.

The gains of the norms of every layer are the same numbers in the FP8, INT4 and BF16 forms of one revision, and differ
between revisions: they are trained. What leaves norms alone, as a LoRA that was merged, is told by samples of other
weights: of those that stay floats in every form, and of quantized ones where both forms have them alike. A few
megabytes are read at most.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator

from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.reader import read_tensor
from quantkit.codecs.float_values import FloatValues
from quantkit.codecs.fp8_block import Fp8Block
from quantkit.errors import SourceError
from quantkit.families.config_values import Config
from quantkit.families.family import Family, Role
from quantkit.module_names import expert_of, layer_of
from quantkit.numerics import bfloat16
from quantkit.statistics.fingerprint import Fingerprint
from quantkit.tensors import BF16, F16, F32, TensorSpec
from quantkit.weights.binding import Binding
from quantkit.weights.weight import Weight

_FLOATS = (BF16, F16, F32)
_NORM = "norm.weight"
_STAY_FLOATS = {Role.ROUTER, Role.ROUTER_BIAS, Role.EMBEDDING, Role.HEAD}
_NOT_SAMPLED = {Role.NORM, Role.VISION, Role.KV_SCALE, Role.UNKNOWN}
_SAMPLE = 1024  # numbers of a weight
_SAMPLED_EXPERTS = 4  # one a layer, in turns


def model_fingerprint(binding: Binding, family: Family, config: Config) -> Fingerprint:
    """Digests of the gains of all norms of the decoder as BF16 values, by name behind the root, and of samples.

    MTP layers do not count: an output may lack them. Raises SourceError where there is none to read.
    """
    norms: dict[str, Weight] = {}
    others: dict[Role, dict[str, Weight]] = defaultdict(dict)
    for weight in binding.weights.values():
        layer = layer_of(weight.name)
        if layer is not None and layer.number >= family.num_layers(config):
            continue
        key = weight.name if layer is None else f"{layer.number}.{layer.rest}"
        role = family.role_of(weight.name)
        if role is Role.NORM:
            is_bare = layer is None or layer.rest == _NORM  # fingerprints have always been without those
            if weight.name.endswith(_NORM) and not is_bare and weight.stored.spec.dtype in _FLOATS:
                norms[key] = weight
        elif role not in _NOT_SAMPLED and _is_sampled(weight):
            others[role][key] = weight
    if not norms:
        raise SourceError("has no norms below layers.N, by which a model is known", remedy="name a language model")
    digest = hashlib.sha256()
    for name, weight in sorted(norms.items()):
        digest.update(f"{name} {list(weight.shape)}\n".encode())
        digest.update(_bf16_bytes(weight, weight.stored))
    is_plain = all(isinstance(weight.codec, FloatValues) for weight in binding.weights.values())
    return Fingerprint(norms=digest.hexdigest(), samples=dict(_samples(others, is_plain=is_plain)))


def _is_sampled(weight: Weight) -> bool:
    expert = expert_of(weight.name)
    layer = layer_of(weight.name)
    return expert is None or layer is None or expert.number == layer.number % _SAMPLED_EXPERTS


def _samples(others: dict[Role, dict[str, Weight]], *, is_plain: bool) -> Iterator[tuple[str, str]]:
    """A digest for each role whose weights all have one form, under a key that another form does not have.

    Floats beside quantized weights may have been quantized once; where all are floats they are taken for their own.
    """
    for role, weights in others.items():
        forms = {_form(weight) for weight in weights.values()}
        form = next(iter(forms))
        if len(forms) > 1 or form is None or (form == "float" and role not in _STAY_FLOATS and not is_plain):
            continue
        digest = hashlib.sha256()
        for name, weight in sorted(weights.items()):
            digest.update(f"{name} {list(weight.shape)}\n".encode())
            for part in _parts(weight.stored):
                digest.update(_bf16_bytes(weight, part) if form == "float" else read_tensor(part).tobytes())
        yield f"{role.value}/{form}", digest.hexdigest()


def _form(weight: Weight) -> str | None:
    """None where two checkpoints may hold the same in different bytes, or no more than nearly the same."""
    if isinstance(weight.codec, Fp8Block):
        return f"fp8-{weight.codec.block_rows}x{weight.codec.block_cols}"
    return "float" if isinstance(weight.codec, FloatValues) else None


def _parts(stored: StoredTensor) -> Iterator[StoredTensor]:
    """The first numbers, some in the middle, and the last."""
    count = stored.spec.num_elements
    flat = StoredTensor(stored.name, TensorSpec(stored.spec.dtype, (count,)), stored.path, stored.begin)
    for first in sorted({0, max(count - _SAMPLE, 0) // 2, max(count - _SAMPLE, 0)}):
        yield flat.rows(first, min(first + _SAMPLE, count))


def _bf16_bytes(weight: Weight, part: StoredTensor) -> bytes:
    return bfloat16.from_float32(weight.codec.decode({weight.main: read_tensor(part)}, 0)).tobytes()
