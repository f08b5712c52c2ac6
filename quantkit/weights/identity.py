"""Which model a checkpoint is, whatever the format of its weights: what is never quantized tells it.

The gains of the norms of every layer are the same numbers in the FP8, INT4 and BF16 forms of one revision, and differ
between revisions: they are trained. A few hundred kilobytes are read.
"""

import hashlib

from quantkit.checkpoint.reader import read_tensor
from quantkit.errors import SourceError
from quantkit.families.config_values import Config
from quantkit.families.family import Family, Role
from quantkit.module_names import layer_of
from quantkit.numerics import bfloat16
from quantkit.tensors import BF16, F16, F32
from quantkit.weights.binding import Binding

_FLOATS = (BF16, F16, F32)
_NORM = "norm.weight"


def model_fingerprint(binding: Binding, family: Family, config: Config) -> str:
    """sha256 of the gains of all norms of the decoder as BF16 values, by name behind the root; in hexadecimal.

    MTP layers do not count: an output may lack them.

    Raises SourceError where there is none to read.
    """
    gains = {}
    for weight in binding.weights.values():
        layer = layer_of(weight.name) if weight.name.endswith(_NORM) else None
        if layer is None or layer.rest == _NORM or layer.number >= family.num_layers(config):
            continue  # fingerprints have always been without a bare norm
        if family.role_of(weight.name) is Role.NORM and weight.stored.spec.dtype in _FLOATS:
            gains[f"{layer.number}.{layer.rest}"] = weight
    if not gains:
        raise SourceError("has no norms below layers.N, by which a model is known", remedy="name a language model")
    digest = hashlib.sha256()
    for name, weight in sorted(gains.items()):
        values = weight.codec.decode({weight.main: read_tensor(weight.stored)}, 0)
        digest.update(f"{name} {list(weight.shape)}\n".encode())
        digest.update(bfloat16.from_float32(values).tobytes())
    return digest.hexdigest()
