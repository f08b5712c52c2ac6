"""What a ``quantization_config`` says, as engines read it: an ordered list of targets, each with a scheme.

A scheme knows which tensors a weight of [out, in] is stored as. Source: compressed-tensors 0.17 and 0.18, which vLLM
0.33.0 and SGLang 0.5.23 pin, and SGLang's ``w4afp8``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from quantkit.tensors import BF16, F8_E4M3, F16, F32, I8, I32, I64, U8, DType

ExpertKind = Literal["w4a16", "zero points", "w4a8", "w4afp8"]
FLOATS = (BF16, F16, F32)
PACK_QUANTIZED, FLOAT_QUANTIZED = "pack-quantized", "float-quantized"

# keys that engines validate; another one is an error when the server starts
WEIGHT_KEYS = frozenset(
    {
        *("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder"),
        *("scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
    }
)


class Part(NamedTuple):
    """A stored tensor: the dtypes that a loader takes as they are, and its shape; None for one that it ignores."""

    dtypes: tuple[DType, ...]
    shape: tuple[int, ...] | None
    optional: bool = False


Parts = Mapping[str, Part]  # by leaf


class Activations(NamedTuple):
    """How the input of a module is quantized."""

    num_bits: int
    is_float: bool
    strategy: str
    is_dynamic: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A group of the config. ``activations`` is None where they are not quantized."""

    name: str
    num_bits: int
    is_float: bool
    strategy: str
    group_size: int | None = None
    block: tuple[int, int] | None = None
    is_symmetric: bool = True
    is_dynamic: bool = False
    actorder: str | bool | None = None
    format: str | None = None
    activations: Activations | None = None

    @property
    def is_int4(self) -> bool:
        return not self.is_float and self.num_bits == 4

    @property
    def is_weight_only(self) -> bool:
        return self.activations is None

    def __str__(self) -> str:
        kind = f"{'FP' if self.is_float else 'INT'}{self.num_bits}"
        where = f" in groups of {self.group_size}" if self.group_size else f" per {self.strategy}"
        return kind + where + ("" if self.is_symmetric else ", asymmetric") + (", W4A8" if self.is_w4a8 else "")

    @property
    def is_w4a8(self) -> bool:
        """INT4 weights and activations of 8 bits."""
        return self.is_int4 and self.activations is not None

    def parts(self, rows: int, cols: int) -> Parts:
        """What a weight of [out, in] is stored as."""
        if self.is_float:
            scales: dict[str, tuple[int, ...]] = {"channel": (rows, 1), "tensor": (1,)}
            if self.block is not None:
                scales["block"] = (-(-rows // self.block[0]), -(-cols // self.block[1]))
            return {
                "weight": Part((F8_E4M3,), (rows, cols)),
                "weight_scale": Part((F32, BF16), scales.get(self.strategy)),
                "input_scale": Part(FLOATS, None, optional=self.is_dynamic_activation),
            }
        words, groups = -(-cols * self.num_bits // 32), cols // self.group_size if self.group_size else 1
        parts = {
            "weight_packed": Part((I32,), (rows, words)),
            "weight_scale": Part(FLOATS, (rows, groups)),
            "weight_shape": Part((I64, I32), (2,)),
        }
        if not self.is_symmetric:
            parts["weight_zero_point"] = Part((I32,), (-(-rows * self.num_bits // 32), groups))
        return parts

    @property
    def is_dynamic_activation(self) -> bool:
        return self.activations is None or self.activations.is_dynamic


def plain_parts(rows: int, cols: int) -> Parts:
    """A weight that is not quantized."""
    return {"weight": Part(FLOATS, (rows, cols))}


def native_fp8_parts(rows: int, cols: int) -> Parts:
    """FP8 in blocks of 128 by 128 under DeepSeek's names."""
    return {
        "weight": Part((F8_E4M3,), (rows, cols)),
        "weight_scale_inv": Part((F32, BF16), (-(-rows // 128), -(-cols // 128))),
        "input_scale": Part(FLOATS, None, optional=True),
    }


def w4afp8_parts(rows: int, cols: int) -> Parts:
    """Signed nibbles, the even column in the lower one; groups of 128."""
    return {
        "weight": Part((I8, U8), (rows, cols // 2)),
        "weight_scale_inv": Part(FLOATS, (rows, cols // 128)),
        "input_scale": Part(FLOATS, (), optional=True),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A ``quantization_config``. ``targets`` in the order in which engines look at them."""

    method: str
    format: str | None
    targets: Mapping[str, Scheme]
    ignore: Sequence[str]
    kv_cache: Any = None
    has_native_linears: bool = False  # SGLang's linear_fp8_config: every Linear is native FP8

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """Each group once."""
        return tuple(dict.fromkeys(self.targets.values()))


def read_section(document: Mapping[str, Any]) -> Section:
    """``document``: a section that ``section_errors`` finds nothing in."""
    targets: dict[str, Scheme] = {}
    for name, group in (document.get("config_groups") or {}).items():
        scheme = _scheme(name, group)
        targets |= dict.fromkeys(group.get("targets") or (), scheme)
    return Section(
        method=str(document.get("quant_method", "")),
        format=document.get("format"),
        targets=targets,
        ignore=tuple(document.get("ignore", ())),
        kv_cache=document.get("kv_cache_scheme"),
        has_native_linears="linear_fp8_config" in document,
    )


def quantization_document(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section of a config where engines look for it; empty where there is none."""
    text = config.get("text_config")
    for place, key in ((config, "quantization_config"), (text, "quantization_config"), (config, "compression_config")):
        found = place.get(key) if isinstance(place, Mapping) else None
        if isinstance(found, Mapping):
            return found
    return {}


def expert_kind(section: Section, experts: Scheme | None) -> ExpertKind:
    """What kernels call the INT4 experts of a scheme."""
    if section.method == "w4afp8":
        return "w4afp8"
    if experts is None or experts.is_symmetric:
        return "w4a8" if experts is not None and experts.is_w4a8 else "w4a16"
    return "zero points"


def kind_of(config: Mapping[str, Any]) -> ExpertKind:
    """Of the INT4 group of a whole config.json; W4A16 where it has none that can be read."""
    document = quantization_document(config)
    if next(section_errors(document), None) is not None:
        return "w4a16"
    section = read_section(document)
    return expert_kind(section, next((scheme for scheme in section.schemes if scheme.is_int4), None))


def _scheme(name: str, group: Mapping[str, Any]) -> Scheme:
    weights = group["weights"]
    size, block = weights.get("group_size"), weights.get("block_structure")
    default = "group" if size and size > 0 else "block" if block else "tensor"
    return Scheme(
        name=name,
        num_bits=weights.get("num_bits", 8),
        is_float=weights.get("type", "int") == "float",
        strategy=weights.get("strategy") or default,
        group_size=size if size and size > 0 else None,
        block=(block[0], block[1]) if block else None,
        is_symmetric=weights.get("symmetric", True),
        is_dynamic=bool(weights.get("dynamic", False)),
        actorder=weights.get("actorder"),
        format=group.get("format"),
        activations=_activations(group.get("input_activations")),
    )


def _activations(arguments: Mapping[str, Any] | None) -> Activations | None:
    if arguments is None:
        return None
    return Activations(
        num_bits=arguments.get("num_bits", 8),
        is_float=arguments.get("type", "int") == "float",
        strategy=arguments.get("strategy") or ("group" if arguments.get("group_size") else "tensor"),
        is_dynamic=bool(arguments.get("dynamic", False)),
    )


def section_errors(document: Mapping[str, Any]) -> Iterator[str]:
    """What keeps engines from reading the section at all."""
    if "ignore" in document and not _is_list_of_text(document["ignore"]):
        yield f"ignore is {str(document['ignore'])[:80]}, not a list of names and patterns: leave it out instead"
    if "linear_fp8_config" in document and not isinstance(document["linear_fp8_config"], Mapping):
        yield "linear_fp8_config is no object: leave it out instead"
    sparsity = document.get("sparsity_config")
    if sparsity and isinstance(sparsity, Mapping) and sparsity.get("targets"):
        yield "sparsity_config has targets, and sparse weights are no longer loaded"
    groups = document.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        yield "config_groups is no object"
        return
    for name, group in groups.items():
        yield from (f"config_groups.{name}: {problem}" for problem in _group_errors(group))


def _group_errors(group: Any) -> Iterator[str]:
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        yield "has no weights"
        return
    if not _is_list_of_text(group.get("targets")):
        yield "targets is not a list of names and patterns"
    for key in ("weights", "input_activations"):
        arguments = group.get(key)
        if arguments is None:
            continue
        if not isinstance(arguments, Mapping):
            yield f"{key} is no object"
            continue
        unknown = sorted(set(arguments) - WEIGHT_KEYS)
        if unknown:
            yield f"{key} has the unknown key {', '.join(unknown)}, which ends the server's start"
        if "observer_kwargs" in arguments and arguments["observer_kwargs"] is None:
            yield f"{key}.observer_kwargs is null: leave it out or write {{}}"
        if arguments.get("block_structure") and arguments.get("strategy") not in (None, "block"):
            yield f"{key} has a block_structure and the strategy {arguments['strategy']}"


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(one, str) for one in value)
