"""Name patterns that decoder families share, below any prefix.

They match module names, tensor names and stored names alike: a pattern ends at a dot or at the name's end.
Experts come first, since they are 98 % of the names.
"""

import re

from quantkit.families.family import Role, RolePatterns

_MLP = r"(?:gate|up|gate_up|down)_proj"


def module(pattern: str, role: Role) -> tuple[re.Pattern[str], Role]:
    """Whole parts of a dotted name: ``gate`` hits ``mlp.gate.weight``, not ``gate_proj`` or ``agate``."""
    return re.compile(rf"\b{pattern}(?=\.|$)"), role


EXPERTS: RolePatterns = (module(rf"experts\.(?:\d+\.)?{_MLP}", Role.ROUTED_EXPERT),)

# before what they are of: a scale of the cache is no part of a projection, wherever it stands
KV_SCALES: RolePatterns = ((re.compile(r"\.[kv]_scale$"), Role.KV_SCALE),)

VISION: RolePatterns = (
    module(r"(?:vision_tower|vision_model|visual|mm_projector|multi_modal_projector)", Role.VISION),
)

MLP: RolePatterns = (
    module(rf"shared_experts?\.{_MLP}", Role.SHARED_EXPERT),
    module(rf"mlp\.{_MLP}", Role.DENSE_MLP),
    module(r"e_score_correction_bias", Role.ROUTER_BIAS),
    module(r"mlp\.gate", Role.ROUTER),
)

MLA: RolePatterns = (
    module(r"self_attn\.kv_b_proj", Role.KV_B),
    module(r"self_attn\.(?:q_a_proj|q_b_proj|q_proj|kv_a_proj_with_mqa|o_proj)", Role.ATTENTION),
)

GQA: RolePatterns = (module(r"self_attn\.[qkvo]_proj", Role.ATTENTION),)

INDEXER: RolePatterns = (
    module(r"indexer\.wq_b", Role.INDEXER),
    module(r"indexer\.(?:wk|weights_proj|k_norm)", Role.INDEXER_FIXED),
)

ENDS: RolePatterns = (
    module(r"eh_proj", Role.MTP_PROJECTION),
    module(r"(?:lm_head|shared_head\.head)", Role.HEAD),
    module(r"embed_tokens", Role.EMBEDDING),
    module(r"\w*norm", Role.NORM),
)

# config entries that cover the names in the files and those of modules that engines fuse; none hits an expert
IGNORE_ALL_BUT_EXPERTS: tuple[str, ...] = (
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    r"re:.*mlp\.gate$",
)
IGNORE_MTP_PROJECTION: tuple[str, ...] = (r"re:.*\.eh_proj$",)
IGNORE_VISION: tuple[str, ...] = ("re:.*vision_tower.*", "re:.*mm_projector.*")
