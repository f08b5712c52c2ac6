"""How rows of a KV cache are stored."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from quantkit.errors import UsageError
from quantkit.families.kv_shape import KvShape, LatentKv

PoolRole = Literal["both", "prefill", "decode"]
POOL_ROLES: tuple[PoolRole, ...] = ("both", "prefill", "decode")
_LATENT_SCALE_GROUP, _FP32_BYTES, _BF16_BYTES = 128, 4, 2


class KvDtype(StrEnum):
    """What keys and values are stored in."""

    BF16 = "bf16"
    FP8 = "fp8"

    @property
    def num_bytes(self) -> int:
        return 2 if self is KvDtype.BF16 else 1


class KvLayout(StrEnum):
    """``raw``: values one behind another. ``packed``: sparse attention's FP8 row, with scales and a BF16 rope part."""

    RAW = "raw"
    PACKED = "packed"


# what people, engines and torch call them, and what that decides; None is left to the engine
KV_DTYPE_WORDS: Mapping[str, tuple[KvDtype | None, KvLayout | None]] = {
    "bf16": (KvDtype.BF16, None),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), (KvDtype.FP8, None)),
    "fp8_ds_mla": (KvDtype.FP8, KvLayout.PACKED),
    "auto": (None, None),
    **dict.fromkeys(("bfloat16", "float16", "half"), (KvDtype.BF16, None)),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), (KvDtype.FP8, None)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFormat:
    """``chosen_by``: whose choice it is, in words."""

    dtype: KvDtype
    layout: KvLayout
    chosen_by: str

    def row_bytes(self, shape: LatentKv) -> int:
        """One latent row: 1152 in BF16, 576 raw FP8, 656 packed (512 codes, 4 FP32 scales, 64 BF16 rope values)."""
        if self.layout is KvLayout.PACKED:
            scales = shape.latent_dim // _LATENT_SCALE_GROUP * _FP32_BYTES
            return shape.latent_dim + scales + shape.rope_dim * _BF16_BYTES
        return (shape.latent_dim + shape.rope_dim) * self.dtype.num_bytes


def index_key_bytes(shape: LatentKv) -> int:
    """FP8 codes and one FP32 scale for every 128 of them, whatever the KV dtype."""
    return shape.index_dim + -(-shape.index_dim // _LATENT_SCALE_GROUP) * _FP32_BYTES


def check_format(shape: KvShape, kv_format: KvFormat) -> None:
    """Raise UsageError for a layout that the model's attention does not have."""
    if kv_format.layout is KvLayout.PACKED:
        if not shape.is_sparse:
            raise UsageError(
                "--kv-layout packed: 656-byte rows (fp8_ds_mla) exist for sparse attention (DSA: GLM-5.x, "
                "DeepSeek-V3.2) only",
                remedy="leave --kv-layout out, and give --kv-dtype fp8 for fp8_ds_mla",
            )
        if kv_format.dtype is not KvDtype.FP8:
            raise UsageError("--kv-layout packed is an FP8 layout", remedy="add --kv-dtype fp8")
