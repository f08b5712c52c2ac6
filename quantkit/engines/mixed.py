"""Which weights may stay in FP8 blocks beside experts in INT4, in one compressed-tensors config.

The target ``Linear`` is the INT4 group: SGLang's W4A16 experts, and whether it fuses shared experts, hang on it. Its
fused layers then find no block size and end with a TypeError, so gate and up stay BF16 for it, and so do q, k and v
where they are fused; ``kv_b_proj`` would be decoded by a block size that is not there. vLLM loads gate and up, too.
"""

from collections.abc import Collection

from quantkit.engines.parallel import EngineName
from quantkit.families.family import Role

_ROLES = frozenset({Role.ATTENTION, Role.INDEXER, Role.SHARED_EXPERT, Role.DENSE_MLP})
# every Linear but the indexer's ``wk``, which is BF16 in each compressed-tensors form
NATIVE_FP8_ROLES = _ROLES | {Role.KV_B}
_ALONE = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj", "wq_b", "down_proj"})
_FUSED = frozenset({"gate_proj", "up_proj", "q_proj", "k_proj", "v_proj"})
BLOCK = (128, 128)  # the only one that both engines have a kernel for


def keeps_fp8(module: str, role: Role, engines: Collection[EngineName]) -> bool:
    """Whether every one of these engines loads the module as FP8 blocks beside INT4 experts."""
    leaf = module.rpartition(".")[2]
    return role in _ROLES and (leaf in _ALONE or (leaf in _FUSED and "sglang" not in engines))
