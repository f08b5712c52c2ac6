"""How the tensors of a statistics file are called.

``MODULE`` is a Linear by its name in the checkpoint. All routed experts of a layer share one tensor for each kind,
``LAYER.mlp.experts.gate_up_proj`` (the input that gate and up have in common) and ``....down_proj``, whose first
dimension counts the experts. Legend: C input channels, E experts, H heads or tiles, B bins of a histogram.
"""

from enum import StrEnum

SECOND_MOMENT = ".input_second_moment"  # F32 [C] or [E, C]: mean of the squares over the tokens that the module saw
ABSMAX = ".input_absmax"  # F32 [C] or [E, C]: largest magnitude; zero where no token was seen
TOKEN_COUNT = ".token_count"  # I64 [] or [E]: tokens that the module saw

GATE_UP, DOWN = "gate_up_proj", "down_proj"

# of ``ATTENTION.PART``: F32 [H] largest magnitudes, I64 [H, B] counts of magnitudes (`numerics.magnitudes`)
HISTOGRAM, LARGEST = "_histogram", "_absmax"
TILE = 128  # latent channels that share a scale in rows of sparse attention


class KvPart(StrEnum):
    """What the KV cache holds of a token.

    Keys, after rotation, and values: a row for each KV head. Of latent attention: a row for each ``TILE`` channels, and
    one for the rotated part of the key.
    """

    KEY = "k"
    VALUE = "v"
    LATENT = "latent"
    ROPE = "rope"
