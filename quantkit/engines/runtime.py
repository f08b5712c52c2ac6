"""The modules that an engine builds from a config: runtime name, class, and the checkpoint modules it is made of.

Only what can be quantized or what fuses: norms and biases are loaded as they are by every engine.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from quantkit.engines.matching import Matching, Packed
from quantkit.engines.schemes import Scheme, Section
from quantkit.families.config_values import Config
from quantkit.families.family import NOT_LINEAR, ExpectedTensor, Family, Role
from quantkit.module_names import experts_in, layer_name, layer_of


class Kind(StrEnum):
    """How a module gets its scheme: by the config, as one for all experts, by name alone, or never."""

    LINEAR = "linear"
    EXPERTS = "experts"
    HEAD = "head"
    PLAIN = "plain"


class Member(NamedTuple):
    """A module of the checkpoint, and the shape [out, in] of its weight. ``optional``: it may be absent."""

    module: str
    shape: tuple[int, int]
    optional: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeModule:
    """``name`` as the engine asks for it; of experts the name of their list."""

    name: str
    class_name: str
    kind: Kind
    members: tuple[Member, ...] = ()
    is_draft: bool = False


class Build(NamedTuple):
    """What an engine makes of a leaf: another name where it fuses, and a class."""

    name: str
    class_name: str


COLUMN, ROW = "ColumnParallelLinear", "RowParallelLinear"
MERGED, QKV, REPLICATED = "MergedColumnParallelLinear", "QKVParallelLinear", "ReplicatedLinear"
MLP = {
    "gate_proj": Build("gate_up_proj", MERGED),
    "up_proj": Build("gate_up_proj", MERGED),
    "down_proj": Build("down_proj", ROW),
}
GQA = {leaf: Build("qkv_proj", QKV) for leaf in ("q_proj", "k_proj", "v_proj")} | {"o_proj": Build("o_proj", ROW)}
MLA = {leaf: Build(leaf, COLUMN) for leaf in ("q_proj", "q_b_proj", "kv_b_proj")} | {"o_proj": Build("o_proj", ROW)}
_BUILT_PLAIN = frozenset({Role.ROUTER, Role.MTP_PROJECTION, Role.VISION})
_WITHOUT_MODULE = NOT_LINEAR | {Role.UNKNOWN}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRules:
    """How an engine builds one architecture.

    ``builds``: by the leaf in the checkpoint; ``packed``: what the matcher knows of fused modules. ``layer_root``:
    what stands before ``layers.N`` at run time, None where it is what the files say; ``draft_root``: in place of the
    MTP layer's prefix. ``renames``: old and new text of entries of the config, ``draft_renames`` where a draft is
    built. ``is_plain``: Linear modules beside router and ``eh_proj`` that never ask the config.
    ``refuses_unknown``: whether a tensor that no parameter wants stops loading, by its name;
    ``refuses_spare_indexers``: whether those of layers that reuse another's choice do.
    """

    builds: Mapping[str, Build]
    packed: Packed
    expert_class: str
    layer_root: str | None = None
    draft_root: str | None = None
    renames: tuple[tuple[str, str], ...] = ()
    draft_renames: tuple[tuple[str, str], ...] = ()
    is_plain: Callable[[str, Config], bool] = field(default=lambda _leaf, _config: False)
    refuses_unknown: Callable[[str], bool] = field(default=lambda _name: True)
    refuses_spare_indexers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules:
    """One engine: its version, how it matches names, and the architectures whose classes were read, by family.

    ``linear_errors`` and ``expert_errors``: why a Linear, or routed experts, cannot have a scheme. ``reads_w4afp8`` and
    ``reads_native_linears``: forms of SGLang's.
    """

    name: str
    version: str
    matching: Matching
    models: Mapping[str, ModelRules]
    linear_errors: Callable[[RuntimeModule, Scheme, Section], Iterator[str]]
    expert_errors: Callable[[Scheme, Section], Iterator[str]]
    reads_w4afp8: bool = False
    reads_native_linears: bool = False


def runtime_modules(family: Family, config: Config, rules: ModelRules, *, root: str) -> Iterator[RuntimeModule]:
    """Every module that may be quantized, in the checkpoint's order. ``root``: before ``layers.N`` in the files."""
    text, num_layers = family.text_config(config), family.num_layers(config)
    found: dict[str, RuntimeModule] = {}
    members: dict[str, list[Member]] = {}
    names: dict[str, str] = {}  # of what is one module at run time; the experts of a layer are, by the thousand
    for tensor in family.expected_tensors(config, root=root):
        if tensor.role in _WITHOUT_MODULE or len(tensor.shape) != 2 or not tensor.name.endswith(".weight"):
            continue
        module = tensor.name.removesuffix(".weight")
        key = experts_in(module) or module
        if key not in names:
            built = _runtime_module(tensor, rules, text, root, num_layers)
            names[key] = built.name
            found.setdefault(built.name, built)
        rows, cols = tensor.shape
        members.setdefault(names[key], []).append(Member(module, (rows, cols), tensor.optional))
    for name, built in found.items():
        yield replace(built, members=tuple(members[name]))


def _runtime_module(
    tensor: ExpectedTensor, rules: ModelRules, config: Config, root: str, num_layers: int
) -> RuntimeModule:
    """What a tensor becomes part of, without members."""
    name, is_draft = _runtime_name(tensor.name.removesuffix(".weight"), rules, root, num_layers)
    experts = experts_in(name)
    if experts is not None:
        return RuntimeModule(name=experts, class_name=rules.expert_class, kind=Kind.EXPERTS, is_draft=is_draft)
    if tensor.role is Role.HEAD:
        return RuntimeModule(name=name, class_name="ParallelLMHead", kind=Kind.HEAD, is_draft=is_draft)
    parent, _, leaf = name.rpartition(".")
    build = rules.builds.get(leaf, Build(leaf, REPLICATED))
    is_plain = tensor.role in _BUILT_PLAIN or rules.is_plain(leaf, config)
    # what is built plain keeps its own name: parts of one dtype are fused by the loader
    return RuntimeModule(
        name=name if is_plain else f"{parent}.{build.name}",
        class_name=build.class_name,
        kind=Kind.PLAIN if is_plain else Kind.LINEAR,
        is_draft=is_draft,
    )


def _runtime_name(module: str, rules: ModelRules, root: str, num_layers: int) -> tuple[str, bool]:
    """The name that the engine's own module has, before fusion; whether it belongs to the draft."""
    outer = root.removesuffix("model.")
    layer = layer_of(module)
    if layer is None or layer.root != root:
        return module if rules.layer_root is None else module.removeprefix(outer), False
    is_draft = layer.number >= num_layers
    if is_draft and rules.draft_root is not None:
        return f"{rules.draft_root}.{layer.rest}", True
    at_run_time = layer_name(root if rules.layer_root is None else rules.layer_root, layer.number)
    return f"{at_run_time}.{layer.rest}", is_draft
