"""INT4 that a checkpoint holds already, in any layout that is read: its parts, found by name and checked by shape."""

from collections.abc import Mapping
from typing import NoReturn

from quantkit.checkpoint.header import StoredTensor
from quantkit.codecs.opaque import NativeInt4
from quantkit.errors import SourceError
from quantkit.layouts import compressed_tensors as ct
from quantkit.layouts import w4afp8
from quantkit.layouts.classic import CLASSIC, G_IDX, QWEIGHT, QZEROS, SCALES
from quantkit.numerics.packing import CODES_PER_WORD
from quantkit.tensors import BF16, F16, F32, I8, I32, I64, U8, DType
from quantkit.weights.source_form import SourceForm
from quantkit.weights.weight import Weight

_FLOATS = (BF16, F16, F32)
_OTHER_CHECKPOINT = "the config and the shards belong to different checkpoints; download both again"
# SGLang's own names of the projections, where activation scales may stand
_W4AFP8_INPUTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def bind_int4(tensor: StoredTensor, tensors: Mapping[str, StoredTensor], form: SourceForm) -> Weight | None:
    """The INT4 weight whose main part this is; None for anything else. Raises SourceError for parts that do not fit."""
    if tensor.name.endswith("." + ct.PACKED):
        return _packed(tensor, tensors, form)
    if tensor.name.endswith("." + QWEIGHT):
        return _classic(tensor, tensors, form)
    is_byte_pairs = form.int4_layout == w4afp8.METHOD and tensor.spec.dtype in (I8, U8)
    if is_byte_pairs and tensor.name.endswith("." + w4afp8.WEIGHT):
        return _w4afp8(tensor, tensors, form)
    return None


def _fail(tensor: StoredTensor, message: str, remedy: str) -> NoReturn:
    raise SourceError(message, tensor=tensor.name, file=tensor.path.name, remedy=remedy)


def _codec(tensor: StoredTensor, form: SourceForm, layouts: tuple[str, ...]) -> NativeInt4:
    if form.int4_group_size is None or form.int4_layout not in layouts:
        declared = "no INT4 group" if form.int4_group_size is None else f"INT4 as {form.int4_layout} stores it"
        _fail(
            tensor,
            f"is packed INT4, but config.json declares {declared}",
            "download the config.json that belongs to this checkpoint",
        )
    return form.native_int4()


def _packed(packed: StoredTensor, tensors: Mapping[str, StoredTensor], form: SourceForm) -> Weight:
    stem = packed.name.removesuffix(ct.PACKED)
    if packed.spec.dtype != I32 or len(packed.spec.shape) != 2:
        _fail(
            packed,
            f"is {packed.spec}: MXFP4, NVFP4 and other packed formats are not supported",
            "supported packed sources: INT4 in compressed-tensors form (I32 words)",
        )
    codec = _codec(packed, form, ("compressed-tensors",))
    if stem + ct.GROUP_INDEX in tensors:
        _fail(tensors[stem + ct.GROUP_INDEX], "reordered INT4 is not supported", "quantize without activation order")
    rows, cols = packed.spec.shape[0], packed.spec.shape[1] * CODES_PER_WORD
    scale = tensors.get(stem + ct.SCALE)
    if scale is None:
        _fail(packed, "is packed INT4 and its weight_scale is missing", "download the shard that holds it")
    parts = {"packed": packed, "scale": scale}
    _check_scale(scale, (rows, cols // codec.group_size), rows, cols, codec)
    zero = tensors.get(stem + ct.ZERO_POINT)
    if (zero is None) != codec.is_symmetric:
        what = "symmetric INT4, and there are zero points" if zero else "zero points, and there are none"
        _fail(zero or packed, f"config.json declares {what}", _OTHER_CHECKPOINT)
    if zero is not None:
        parts["zero"] = _checked(zero, I32, (-(-rows // CODES_PER_WORD), cols // codec.group_size))
    if stem + ct.SHAPE in tensors:
        parts["shape"] = tensors[stem + ct.SHAPE]
        if parts["shape"].spec.dtype not in (I32, I64) or parts["shape"].spec.shape != (2,):
            _fail(parts["shape"], f"is {parts['shape'].spec}, not two integers", "download this shard again")
    return _weight(stem, (rows, cols), codec, parts)


def _w4afp8(packed: StoredTensor, tensors: Mapping[str, StoredTensor], form: SourceForm) -> Weight:
    stem = packed.name.removesuffix(w4afp8.WEIGHT)
    codec = _codec(packed, form, (w4afp8.METHOD,))
    scale = tensors.get(stem + w4afp8.SCALE)
    if scale is None:
        _fail(packed, f"is packed INT4 and its {w4afp8.SCALE} is missing", "download the shard that holds it")
    if len(packed.spec.shape) != 2:
        _fail(packed, f"is {packed.spec}, not a matrix", "store experts one by one")
    rows, cols = packed.spec.shape[0], packed.spec.shape[1] * 2
    _check_scale(scale, (rows, cols // codec.group_size), rows, cols, codec)
    parts = {"packed": packed, "scale": scale}
    parent, _, leaf = stem.removesuffix(".").rpartition(".")
    names = dict.fromkeys((leaf, _W4AFP8_INPUTS.get(leaf, leaf)))
    inputs = [one for name in names if (one := tensors.get(f"{parent}.{name}.{w4afp8.INPUT_SCALE}")) is not None]
    if len(inputs) > 1:
        _fail(inputs[0], f"is also there as {inputs[1].name}", "keep the one that belongs to it")
    for one in inputs:
        if one.spec.dtype not in _FLOATS or one.spec.num_elements != 1:
            _fail(one, f"is {one.spec}, not one float", "download this shard again")
        parts["input_scale"] = one
    return _weight(stem, (rows, cols), codec, parts)


def _classic(packed: StoredTensor, tensors: Mapping[str, StoredTensor], form: SourceForm) -> Weight:
    """AutoGPTQ and AutoAWQ: [in, out] in one way or the other."""
    stem = packed.name.removesuffix(QWEIGHT)
    codec = _codec(packed, form, tuple(CLASSIC))
    if packed.spec.dtype != I32 or len(packed.spec.shape) != 2:
        _fail(packed, f"is {packed.spec}, not a matrix of I32 words", "download this shard again")
    height, width = packed.spec.shape
    rows, cols = CLASSIC[codec.layout].weight_shape(height, width)
    if rows % CODES_PER_WORD:
        _fail(packed, f"has {rows} rows, and zero points are packed by {CODES_PER_WORD}", "download this shard again")
    groups = cols // codec.group_size
    scale = tensors.get(stem + SCALES)
    if scale is None:
        _fail(packed, "is packed INT4 and its scales are missing", "download the shard that holds them")
    _check_scale(scale, (groups, rows), rows, cols, codec)
    parts = {"packed": packed, "scale": scale}
    zero, order = tensors.get(stem + QZEROS), tensors.get(stem + G_IDX)
    if order is None and form.has_order:
        _fail(
            packed,
            "has its columns in another order by its config (desc_act), and no g_idx",
            "download its shards again",
        )
    if zero is None and not codec.is_symmetric:
        _fail(packed, "has zero points by its config, and no qzeros", "download the shard that holds them")
    if zero is not None:
        parts["zero"] = _checked(zero, I32, (groups, rows // CODES_PER_WORD))
    if order is not None:
        parts["order"] = _checked(order, I32, (cols,))
    return _weight(stem, (rows, cols), codec, parts)


def _check_scale(scale: StoredTensor, shape: tuple[int, int], rows: int, cols: int, codec: NativeInt4) -> None:
    if scale.spec.shape != shape or cols % codec.group_size or scale.spec.dtype not in _FLOATS:
        _fail(
            scale,
            f"is {scale.spec}, but INT4 of {rows} x {cols} in groups of {codec.group_size} needs {list(shape)} floats",
            _OTHER_CHECKPOINT,
        )


def _checked(tensor: StoredTensor, dtype: DType, shape: tuple[int, ...]) -> StoredTensor:
    if tensor.spec.dtype != dtype or tensor.spec.shape != shape:
        _fail(tensor, f"is {tensor.spec}, not {dtype.name} {list(shape)}", _OTHER_CHECKPOINT)
    return tensor


def _weight(stem: str, shape: tuple[int, int], codec: NativeInt4, parts: Mapping[str, StoredTensor]) -> Weight:
    return Weight(name=stem + "weight", shape=shape, codec=codec, main="packed", parts=parts)
