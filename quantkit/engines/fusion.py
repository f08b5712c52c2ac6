"""Modules that are separate in a checkpoint and one in an engine: they must share one scheme.

Facts: SGLang 0.5.23 and vLLM 0.33. The indexer's ``wk`` and ``weights_proj`` are not listed: engines decode
both to BF16 before they fuse them, so their storage may differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.errors import RecipeError
from quantkit.module_names import experts_in


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedGroup:
    """Sister leaves that an engine loads as one module, and what each engine calls it."""

    members: tuple[str, ...]
    sglang: str
    vllm: str

    @property
    def fused_leaves(self) -> tuple[str, ...]:
        """Without repeats."""
        return tuple(dict.fromkeys((self.sglang, self.vllm)))


FUSED_GROUPS: tuple[FusedGroup, ...] = (
    FusedGroup(members=("gate_proj", "up_proj"), sglang="gate_up_proj", vllm="gate_up_proj"),
    FusedGroup(members=("w1", "w3"), sglang="gate_up_proj", vllm="gate_up_proj"),
    FusedGroup(
        members=("q_a_proj", "kv_a_proj_with_mqa"),
        sglang="fused_qkv_a_proj_with_mqa",
        vllm="fused_qkv_a_proj",
    ),
    FusedGroup(members=("q_proj", "k_proj", "v_proj"), sglang="qkv_proj", vllm="qkv_proj"),
)

# both engines ask for the scheme of expert 0 and take it for every projection of every expert of the layer
_EXPERTS = FusedGroup(members=(), sglang="experts", vllm="experts")

_GROUP_OF: dict[str, FusedGroup] = {leaf: group for group in FUSED_GROUPS for leaf in group.members}

# for the lists in a config, which must cover the names in the files and those at run time
FUSED_LEAVES: Mapping[str, tuple[str, ...]] = {leaf: group.fused_leaves for leaf, group in _GROUP_OF.items()}


def fused_group(module: str) -> tuple[str, FusedGroup] | None:
    """What a module shares with its sisters (their parent, or the experts of a layer), and their group.

    None for one that stands alone.
    """
    experts = experts_in(module)
    if experts is not None:
        return experts, _EXPERTS
    parent, _, leaf = module.rpartition(".")
    group = _GROUP_OF.get(leaf)
    return None if group is None else (parent, group)


def check_one_scheme(schemes: Mapping[str, str]) -> None:
    """``schemes``: module to the name of what it is stored as, for every weight of a plan."""
    first_of: dict[tuple[str, FusedGroup], tuple[str, str]] = {}
    for module, scheme in schemes.items():
        key = fused_group(module)
        if key is None:
            continue
        first_module, first_scheme = first_of.setdefault(key, (module, scheme))
        if scheme != first_scheme:
            _, group = key
            raise RecipeError(
                f"{first_module} is {first_scheme} and {module} is {scheme}, but engines load them as one "
                f"module ({' or '.join(group.fused_leaves)})",
                remedy="let the recipe's rules give both the same action, or take a source that stores both alike",
            )
