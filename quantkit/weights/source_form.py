"""What a config says about how the weights are stored: which FP8 blocks, which native INT4 group.

The config decides the block size; a tensor's dtype and the presence of a scale decide whether it is quantized. A
block size guessed from shapes is wrong as soon as an edge is ragged.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from quantkit.checkpoint.file_names import CONFIG_NAME
from quantkit.codecs.opaque import NativeInt4
from quantkit.errors import SourceError
from quantkit.layouts import w4afp8

Block = tuple[int | None, int | None]  # None: the whole dimension
CHANNEL: Block = (1, None)
TENSOR: Block = (None, None)
_UNSUPPORTED_REMEDY = (
    "supported: FP8 (E4M3), BF16, FP16, FP32, INT4 of compressed-tensors, w4afp8, GPTQ, AWQ, auto-round"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceForm:
    """``fp8_blocks``: the block shapes that the config declares; ``int4_group_size``: of native INT4 weights, and the
    rest of how these lie."""

    fp8_blocks: tuple[Block, ...] = ()
    int4_group_size: int | None = None
    int4_layout: str = "compressed-tensors"
    is_symmetric: bool = True
    has_order: bool = False  # GPTQ's desc_act: the order of columns is in g_idx

    @lru_cache(maxsize=64)  # noqa: B019  (a few for each process, and one object for all weights)
    def native_int4(self) -> NativeInt4:
        """The codec of native INT4 weights."""
        assert self.int4_group_size is not None
        return NativeInt4(
            group_size=self.int4_group_size,
            layout=self.int4_layout,
            is_symmetric=self.is_symmetric,
        )

    def block_size(self, rows: int, cols: int, choice: int = 0) -> tuple[int, int]:
        """One of the declared blocks at the size of a matrix."""
        block_rows, block_cols = self.fp8_blocks[choice]
        return max(block_rows or rows, 1), max(block_cols or cols, 1)


def source_form(section: Mapping[str, Any]) -> SourceForm:
    """The form that a ``quantization_config`` (or ModelOpt section) declares; an empty section is plain floats."""
    method = str(section.get("quant_method", "")).lower()
    if method.startswith("modelopt") or (not method and "quant_algo" in section):
        method = "modelopt"
    method = {"intel/auto-round": "auto-round"}.get(method, method) if section else "none"
    if method not in SOURCE_METHODS:
        raise _unsupported(f"quant_method {method!r}" if method else "a section without quant_method")
    return SOURCE_METHODS[method].read(section)


def _unsupported(what: str, remedy: str = _UNSUPPORTED_REMEDY) -> SourceError:
    return SourceError(f"quantization_config: {what} is not supported", file=CONFIG_NAME, remedy=remedy)


def _fp8(section: Mapping[str, Any]) -> SourceForm:
    fmt = str(section.get("fmt") or "e4m3").lower()
    if fmt not in {"e4m3", "float8_e4m3fn", "e4m3fn"}:
        raise _unsupported(f"fmt {fmt!r}", "only E4M3 is read")
    block = section.get("weight_block_size")
    if block is None:
        return SourceForm(fp8_blocks=(TENSOR, CHANNEL))
    return SourceForm(fp8_blocks=(_block(block, "weight_block_size"),))


def _block(value: Any, key: str) -> Block:
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in value):
        raise SourceError(
            f"quantization_config: {key} is {value!r}, not two positive integers",
            file=CONFIG_NAME,
            remedy="download config.json again",
        )
    return value[0], value[1]


def _modelopt(section: Mapping[str, Any]) -> SourceForm:
    algorithm = str(section.get("quant_algo", "")).upper()
    if algorithm == "FP8":
        return SourceForm(fp8_blocks=(TENSOR,))
    if algorithm in {"FP8_PER_CHANNEL_PER_TOKEN", "FP8_PC_PT"}:
        return SourceForm(fp8_blocks=(CHANNEL,))
    if algorithm in {"FP8_PB_WO", "FP8_BLOCK"}:
        block = section.get("weight_block_size", [128, 128])
        return SourceForm(fp8_blocks=(_block(block, "weight_block_size"),))
    raise _unsupported(f"quant_algo {algorithm or 'missing'!r}")


def _compressed_tensors(section: Mapping[str, Any]) -> SourceForm:
    groups = section.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _unsupported("a compressed-tensors section without config_groups")
    blocks: list[Block] = []
    int4_groups: set[tuple[int, bool]] = set()
    native = section.get("linear_fp8_config")
    if isinstance(native, Mapping):
        blocks.append(_block(native.get("weight_block_size"), "linear_fp8_config.weight_block_size"))
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise _unsupported(f"config_groups.{name} without weights")
        kind = (weights.get("type"), weights.get("num_bits"))
        if kind == ("float", 8):
            blocks.append(_strategy_block(weights, name))
        elif kind == ("int", 4) and weights.get("strategy") == "group" and type(weights.get("symmetric")) is bool:
            int4_groups.add((_group_size(weights, name), weights["symmetric"]))
        else:
            raise _unsupported(
                f"config_groups.{name} ({weights.get('type')} {weights.get('num_bits')} bits, "
                f"strategy {weights.get('strategy')!r}, symmetric {weights.get('symmetric')})"
            )
    if len(int4_groups) > 1:
        raise _unsupported(f"INT4 in several forms {sorted(int4_groups)} (group size, symmetric)")
    form = SourceForm(fp8_blocks=tuple(dict.fromkeys(blocks)))
    if not int4_groups:
        return form
    group_size, is_symmetric = int4_groups.pop()
    return replace(form, int4_group_size=group_size, is_symmetric=is_symmetric)


def _strategy_block(weights: Mapping[str, Any], name: str) -> Block:
    strategy = weights.get("strategy")
    if strategy == "tensor":
        return TENSOR
    if strategy == "channel":
        return CHANNEL
    if strategy == "block":
        return _block(weights.get("block_structure"), f"config_groups.{name}.weights.block_structure")
    if strategy == "group":
        return 1, _group_size(weights, name)
    raise _unsupported(f"config_groups.{name} with strategy {strategy!r}")


def _group_size(weights: Mapping[str, Any], name: str) -> int:
    size = weights.get("group_size")
    if type(size) is not int or size <= 0:
        raise _unsupported(f"config_groups.{name} with group_size {size!r}")
    return size


def _w4afp8(_: Mapping[str, Any]) -> SourceForm:
    return SourceForm(fp8_blocks=((128, 128),), int4_group_size=w4afp8.GROUP_SIZE, int4_layout=w4afp8.METHOD)


def _given(section: Mapping[str, Any], key: str, default: Any) -> Any:
    """A value of a config, in which null is none."""
    value = section.get(key)
    return default if value is None else value


def _gptq(section: Mapping[str, Any]) -> SourceForm:
    """``checkpoint_format``: the first one stores a zero point less one."""
    fmt = _given(section, "checkpoint_format", "gptq")
    if fmt not in ("gptq", "gptq_v2"):
        raise _unsupported(f"GPTQ checkpoint_format {fmt!r}", "gptq and gptq_v2 are read")
    rules = section.get("dynamic") or {}
    if not isinstance(rules, Mapping) or not all(key.startswith("-:") for key in rules):
        raise _unsupported("GPTQ with settings of its own for some modules (dynamic)", "rules that skip are read")
    form = _classic(section, fmt, is_symmetric=section.get("sym"))
    return replace(form, has_order=_has_order(section))


def _has_order(section: Mapping[str, Any]) -> bool:
    wanted = _given(section, "desc_act", False)
    if type(wanted) is not bool:
        raise _unsupported(f"GPTQ with desc_act {wanted!r}", "it is true or false")
    return wanted


def _awq(section: Mapping[str, Any]) -> SourceForm:
    version = _given(section, "version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise _unsupported(f"AWQ version {version!r}", "gemm is read")
    has_zero_points = section.get("zero_point")
    is_symmetric = not has_zero_points if type(has_zero_points) is bool else None
    return _classic(section, "awq", is_symmetric=is_symmetric)


def _auto_round(section: Mapping[str, Any]) -> SourceForm:
    packing = str(section.get("packing_format") or "").lower()
    if packing not in ("auto_round:auto_gptq", "auto_round:auto_awq"):
        raise _unsupported(f"auto-round packing_format {packing!r}", "auto_round:auto_gptq and auto_round:auto_awq are")
    if str(section.get("data_type") or "int").lower() != "int":
        raise _unsupported(f"auto-round data_type {section['data_type']!r}")
    act_bits = _given(section, "act_bits", 16)
    if type(act_bits) is not int or act_bits < 16:
        raise _unsupported(f"auto-round with act_bits {act_bits!r}", "activations that are not quantized are")
    layout = packing.removeprefix("auto_round:auto_")
    return _classic(section, layout, is_symmetric=section.get("sym"))


def _classic(section: Mapping[str, Any], layout: str, *, is_symmetric: Any) -> SourceForm:
    """AutoGPTQ's and AutoAWQ's tensors: ``qweight``, ``scales``, ``qzeros``."""
    if section.get("bits", section.get("w_bit")) != 4:
        raise _unsupported(f"{layout} of {section.get('bits', section.get('w_bit'))} bits", "4 bits are read")
    if type(is_symmetric) is not bool:
        raise _unsupported(f"a {layout} section that does not say whether it has zero points")
    size = section.get("group_size", section.get("q_group_size"))
    if type(size) is not int or size <= 0:
        raise _unsupported(f"{layout} with group_size {size!r}", "groups of 32, 64 or 128 are read")
    return SourceForm(int4_group_size=size, int4_layout=layout, is_symmetric=is_symmetric)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceMethod:
    """How one ``quant_method`` is read, and what it stands for, in words."""

    read: Callable[[Mapping[str, Any]], SourceForm]
    forms: tuple[str, ...]


SOURCE_METHODS: Mapping[str, SourceMethod] = {
    "none": SourceMethod(read=lambda _: SourceForm(), forms=("BF16, FP16 or FP32 weights",)),
    "fp8": SourceMethod(
        read=_fp8,
        forms=("E4M3 in the blocks of `weight_block_size` (DeepSeek style), ragged edges included", "E4M3 per tensor"),
    ),
    "compressed-tensors": SourceMethod(
        read=_compressed_tensors,
        forms=(
            "E4M3 per block, channel or tensor (`float-quantized`)",
            "INT4 in groups (`pack-quantized`, also beside native FP8): passed through or laid out anew, bit for bit",
        ),
    ),
    "w4afp8": SourceMethod(read=_w4afp8, forms=("SGLang's W4AFP8: laid out anew bit for bit",)),
    "gptq": SourceMethod(read=_gptq, forms=("GPTQ of 4 bits (`gptq`, `gptq_v2`), without activation order",)),
    "awq": SourceMethod(read=_awq, forms=("AWQ of 4 bits (`gemm`)",)),
    "auto-round": SourceMethod(read=_auto_round, forms=("auto-round of 4 bits in GPTQ's or AWQ's packing",)),
    "modelopt": SourceMethod(read=_modelopt, forms=("E4M3 per tensor or channel, also from `hf_quant_config.json`",)),
}
