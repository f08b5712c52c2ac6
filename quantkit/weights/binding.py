"""Bind stored tensors to logical weights: every weight finds its scale, whatever its name and wherever it lies.

Works on names and shapes of the whole checkpoint, never shard by shard and never by walking a model. What is FP8
and finds no scale, and what is a scale and finds no weight, is an error.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.source import Checkpoint
from quantkit.codecs.codec import Codec
from quantkit.codecs.float_values import FloatValues
from quantkit.codecs.fp8_block import Fp8Block
from quantkit.codecs.opaque import Opaque
from quantkit.engines.kv_scales import SCALE_LEAVES
from quantkit.errors import SourceError
from quantkit.families.family import Family
from quantkit.layouts import compressed_tensors as ct
from quantkit.layouts.classic import G_IDX, QZEROS, SCALES
from quantkit.tensors import BF16, F8_E4M3, F8_E5M2, F8_E8M0, F16, F32, F64, I8, U8, DType
from quantkit.weights.fused_experts import is_fused_expert, split_fused
from quantkit.weights.int4_binding import bind_int4
from quantkit.weights.source_form import SourceForm, source_form
from quantkit.weights.weight import Weight

# suffixes of a weight's multiplier, behind the stem of ``<stem>.weight`` or behind a bare parameter's name
_WEIGHT_SCALES = (".weight_scale_inv", ".weight_scale", ".scale", ".weight.scale")
_PARAMETER_SCALES = ("_scale_inv", "_scale", "_weight_scale", ".scale")
# of a weight for certain
_SCALES = (
    *(".weight_scale_inv", ".weight_scale", "_scale_inv", "." + ct.SHAPE, "." + ct.ZERO_POINT),
    *(f".{leaf}" for leaf in (SCALES, QZEROS, G_IDX)),
)
_SCALE_DTYPES = (F32, BF16, F16, F8_E8M0, U8)
# scales of activations and of the KV cache: they belong to the source's scheme, not to the weights
_STATIC_SCALES = (
    *(
        ".input_scale",
        ".output_scale",
        *SCALE_LEAVES,
        ".q_scale",
        ".prob_scale",
        ".prob_output_scale",
    ),
    *("_input_scale", ".input_activation_scale"),
)
_FLOATS = (BF16, F16, F32)
_FLOAT_CODECS: Mapping[DType, Codec] = {dtype: FloatValues(dtype=dtype) for dtype in _FLOATS}
_MAYBE_FP8 = frozenset({U8, I8, F8_E4M3, F8_E5M2})


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """``weights`` by logical name in file order; ``dropped``: tensors without a place in the output, and why."""

    weights: Mapping[str, Weight]
    dropped: Mapping[str, str]


def bind_checkpoint(checkpoint: Checkpoint, family: Family) -> Binding:
    """Logical weights of a checkpoint, stored as its config says."""
    return bind_weights(checkpoint.tensors, source_form(checkpoint.quantization), family.fused_experts)


def bind_weights(
    tensors: Mapping[str, StoredTensor], form: SourceForm, projections: Mapping[str, tuple[str, ...]]
) -> Binding:
    """Logical weights of a catalogue. ``projections``: fused expert leaf to the per-expert leaves it stacks."""
    weights: dict[str, Weight] = {}
    dropped: dict[str, str] = {}
    claimed: set[str] = set()
    leftovers: list[StoredTensor] = []
    for tensor in tensors.values():
        found = _bind(tensor, tensors, form, projections)
        if found is None:
            leftovers.append(tensor)
            continue
        for weight, used in found:
            if weight.name in weights:
                _fail(tensor, f"{weight.name} is stored twice", "keep one of the two forms")
            weights[weight.name] = weight
            claimed.update(used)
    for tensor in leftovers:
        if tensor.name in claimed:
            continue
        if tensor.name.endswith(_STATIC_SCALES):
            dropped[tensor.name] = "a static activation or KV scale of the source's scheme"
            continue
        _check_no_orphan(tensor, tensors)
        if tensor.name in weights:
            _fail(tensor, "is stored twice, in two forms", "keep one of the two forms")
        weights[tensor.name] = _plain(tensor)
    return Binding(weights=weights, dropped=dropped)


def _fail(tensor: StoredTensor, message: str, remedy: str) -> NoReturn:
    raise SourceError(message, tensor=tensor.name, file=tensor.path.name, remedy=remedy)


Bound = list[tuple[Weight, tuple[str, ...]]]  # weights, and the names of the stored tensors that each used


def _bind(
    tensor: StoredTensor,
    tensors: Mapping[str, StoredTensor],
    form: SourceForm,
    projections: Mapping[str, tuple[str, ...]],
) -> Bound | None:
    """Weights whose main part this is, or None for what may be a scale or an ordinary parameter."""
    packed = bind_int4(tensor, tensors, form)
    if packed is not None:
        return [(packed, tuple(part.name for part in packed.parts.values()))]
    is_fused = is_fused_expert(tensor, projections)
    if not is_fused and tensor.spec.dtype not in _MAYBE_FP8:
        return None
    scales = _scales_of(tensor, tensors)
    if tensor.spec.dtype in (U8, I8) and scales:
        _fail(
            tensor,
            f"is {tensor.spec} with a scale ({scales[0].name}): FP8 stored as bytes, INT8 and packed 4-bit look alike",
            "store FP8 weights as F8_E4M3",
        )
    if tensor.spec.dtype == F8_E5M2:
        _fail(tensor, "is FP8 E5M2, which is not supported", "only E4M3 weights are read")
    if is_fused and tensor.spec.dtype in (F8_E4M3, *_FLOATS):
        scale = _only_scale(tensor, scales) if tensor.spec.dtype == F8_E4M3 else None
        block = None if scale is None else _fused_block(tensor, scale, form)
        used = (tensor.name,) if scale is None else (tensor.name, scale.name)
        return [(weight, used) for weight in split_fused(tensor, scale, block, projections, tensors)]
    if tensor.spec.dtype != F8_E4M3:
        return None
    if len(tensor.spec.shape) != 2:
        _fail(
            tensor,
            f"is FP8 of shape {list(tensor.spec.shape)}, not a matrix",
            "this form of checkpoint is unknown",
        )
    if not scales:
        _only_scale(tensor, scales)
    return [(_fp8(tensor, scales, form), (tensor.name, *(scale.name for scale in scales)))]


def _scales_of(tensor: StoredTensor, tensors: Mapping[str, StoredTensor]) -> list[StoredTensor]:
    is_weight = tensor.name.endswith(".weight")
    stem = tensor.name.removesuffix(".weight")
    suffixes = _WEIGHT_SCALES if is_weight else _PARAMETER_SCALES
    return [scale for suffix in suffixes if (scale := tensors.get(stem + suffix)) is not None]


def _only_scale(tensor: StoredTensor, scales: list[StoredTensor]) -> StoredTensor:
    if len(scales) != 1:
        found = ", ".join(scale.name for scale in scales)
        _fail(
            tensor,
            f"is FP8 and carries several scales ({found})" if found else "is FP8 and its scale is missing",
            "keep the one that belongs to it" if found else "download the shard that holds its weight_scale_inv",
        )
    return scales[0]


def _fp8(tensor: StoredTensor, scales: list[StoredTensor], form: SourceForm) -> Weight:
    rows, cols = tensor.spec.shape
    parts = {"codes": tensor, "scale": scales[0]}
    if len(scales) == 2:
        parts["other_scale"] = scales[1]  # legal only if the values agree, which is seen when they are read
    elif len(scales) > 2:
        _only_scale(tensor, scales)
    block, *others = (_block_of(tensor, scale, form, rows, cols) for scale in scales)
    if others not in ([], [block]):
        _fail(tensor, "carries two scales of different shape", "keep the one that belongs to it")
    codec = _fp8_block(*block)
    return Weight(name=tensor.name, shape=(rows, cols), codec=codec, main="codes", parts=parts)


@lru_cache(maxsize=1024)
def _fp8_block(block_rows: int, block_cols: int) -> Fp8Block:
    """One for all weights that are alike."""
    return Fp8Block(block_rows=block_rows, block_cols=block_cols)


@lru_cache(maxsize=4096)
def _fitting_block(
    form: SourceForm, rows: int, cols: int, scale_shape: tuple[int, ...]
) -> tuple[tuple[int, int] | None, tuple[list[int], ...]]:
    """The declared block whose grid a scale of this shape is, or None; and the grids that were looked for."""
    expected = []
    for choice in range(len(form.fp8_blocks)):
        size = form.block_size(rows, cols, choice)
        grid = _fp8_block(*size).grid_shape(rows, cols)
        if scale_shape in _grid_shapes(grid):
            return size, ()
        expected.append(list(grid))
    return None, tuple(expected)


def _block_of(tensor: StoredTensor, scale: StoredTensor, form: SourceForm, rows: int, cols: int) -> tuple[int, int]:
    """Block size of one matrix: what the config declares, checked against the scale's shape."""
    if scale.spec.dtype not in _SCALE_DTYPES:
        _fail(scale, f"is a scale of dtype {scale.spec.dtype.name}", "scales are F32, BF16, F16 or E8M0")
    if not form.fp8_blocks:
        _fail(
            tensor,
            "is FP8, but config.json declares no FP8 quantization, so its block size is unknown",
            "download the config.json that belongs to this checkpoint",
        )
    size, expected = _fitting_block(form, rows, cols, scale.spec.shape)
    if size is not None:
        return size
    _fail(
        scale,
        f"has shape {list(scale.spec.shape)}, but {list(tensor.spec.shape)} needs {' or '.join(map(str, expected))}",
        "the config and the shards belong to different checkpoints; download both again",
    )


def _grid_shapes(grid: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """Shapes in which a grid may be stored: a column without its second dimension, a single value without any."""
    if grid == (1, 1):
        return (grid, (1,), ())
    return (grid, (grid[0],)) if grid[1] == 1 else (grid,)


def _fused_block(tensor: StoredTensor, scale: StoredTensor, form: SourceForm) -> tuple[int, int]:
    num_experts, rows, cols = tensor.spec.shape
    if scale.spec.shape[:1] != (num_experts,) or len(scale.spec.shape) != 3:
        _fail(
            scale,
            f"has shape {list(scale.spec.shape)}, but {list(tensor.spec.shape)} needs one grid for each expert",
            "this form of checkpoint is unknown",
        )
    one_scale = scale.item(0, name=scale.name)
    one = tensor.item(0, name=tensor.name)
    return _block_of(one, one_scale, form, rows, cols)


def _plain(tensor: StoredTensor) -> Weight:
    if tensor.name.endswith(".weight") and len(tensor.spec.shape) == 2 and tensor.spec.dtype not in (*_FLOATS, F64):
        _fail(
            tensor,
            f"is a weight of dtype {tensor.spec.dtype.name} without a scale: what its numbers stand for is unknown",
            "store FP8 weights as F8_E4M3 with their scale, others as BF16, F16 or F32",
        )
    codec = _FLOAT_CODECS.get(tensor.spec.dtype, Opaque())
    return Weight(name=tensor.name, shape=tensor.spec.shape, codec=codec, main="values", parts={"values": tensor})


def _check_no_orphan(tensor: StoredTensor, tensors: Mapping[str, StoredTensor]) -> None:
    """A scale that no weight claimed: the weight is missing, or is not what the scale belongs to."""
    for owner in _owners(tensor.name):
        if owner in tensors:
            _fail(
                tensor,
                f"looks like the scale of {owner}, which is {tensors[owner].spec} and takes none",
                "download both shards again",
            )
    is_certain = tensor.name.endswith(_SCALES)
    is_grid = tensor.name.endswith(".scale") and len(tensor.spec.shape) > 1
    if is_certain or is_grid or tensor.spec.dtype == F8_E8M0:
        _fail(tensor, "is a scale without a weight", "download the shard that holds the weight")


def _owners(name: str) -> Iterator[str]:
    for suffix in _WEIGHT_SCALES:
        if name.endswith(suffix):
            yield name.removesuffix(suffix) + ".weight"
    for suffix in ("_scale_inv", "_scale"):
        if name.endswith(suffix):
            yield name.removesuffix(suffix)
