"""What a config says about how the weights are stored: which FP8 blocks, which native INT4 group.

The config decides the block size; a tensor's dtype and the presence of a scale decide whether it is quantized. A
block size guessed from shapes is wrong as soon as an edge is ragged.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.checkpoint.file_names import CONFIG_NAME
from quantkit.errors import SourceError

Block = tuple[int | None, int | None]  # None: the whole dimension
CHANNEL: Block = (1, None)
TENSOR: Block = (None, None)
_UNSUPPORTED_REMEDY = "supported sources: FP8 (E4M3), BF16, FP16, FP32 and INT4 in compressed-tensors form"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceForm:
    """``fp8_blocks``: the block shapes that the config declares; ``int4_group_size``: of native INT4 weights."""

    fp8_blocks: tuple[Block, ...] = ()
    int4_group_size: int | None = None

    def block_size(self, rows: int, cols: int, choice: int = 0) -> tuple[int, int]:
        """One of the declared blocks at the size of a matrix."""
        block_rows, block_cols = self.fp8_blocks[choice]
        return max(block_rows or rows, 1), max(block_cols or cols, 1)


def source_form(section: Mapping[str, Any]) -> SourceForm:
    """The form that a ``quantization_config`` (or ModelOpt section) declares; an empty section is plain floats."""
    method = str(section.get("quant_method", "")).lower()
    if method.startswith("modelopt") or (not method and "quant_algo" in section):
        method = "modelopt"
    method = method if section else "none"
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
    int4_sizes: set[int] = set()
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise _unsupported(f"config_groups.{name} without weights")
        kind = (weights.get("type"), weights.get("num_bits"))
        if kind == ("float", 8):
            blocks.append(_strategy_block(weights, name))
        elif kind == ("int", 4) and weights.get("strategy") == "group" and weights.get("symmetric") is True:
            int4_sizes.add(_group_size(weights, name))
        else:
            raise _unsupported(
                f"config_groups.{name} ({weights.get('type')} {weights.get('num_bits')} bits, "
                f"strategy {weights.get('strategy')!r}, symmetric {weights.get('symmetric')})"
            )
    if len(int4_sizes) > 1:
        raise _unsupported(f"INT4 groups of several sizes {sorted(int4_sizes)}")
    return SourceForm(
        fp8_blocks=tuple(dict.fromkeys(blocks)),
        int4_group_size=int4_sizes.pop() if int4_sizes else None,
    )


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
            "symmetric INT4 in groups (`pack-quantized`): passed through bit for bit",
        ),
    ),
    "modelopt": SourceMethod(read=_modelopt, forms=("E4M3 per tensor or channel, also from `hf_quant_config.json`",)),
}
