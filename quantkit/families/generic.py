"""Any architecture without a file of its own: roles by customary names, tensors by the headers alone.

What is left inside a numbered layer is ``linear``; whether a tensor is a matrix, its header says.
"""

from quantkit.families import roles
from quantkit.families.family import FAMILIES, Family, Role
from quantkit.families.roles import module

GENERIC = FAMILIES.add(
    "generic",
    Family(
        name="generic",
        model_types=(),
        roles=(
            module(r"experts\.(?:\d+\.)?\w+", Role.ROUTED_EXPERT),
            *roles.EXPERTS,
            *roles.VISION,
            module(r"shared_experts?\.\w+", Role.SHARED_EXPERT),
            module(r"e_score_correction_bias", Role.ROUTER_BIAS),
            module(r"(?:gate|router|gate\.wg|shared_expert_gate)", Role.ROUTER),
            *roles.INDEXER,
            module(r"kv_b_proj", Role.KV_B),
            *roles.ENDS,
            module(r"\w*(?:[nN]orm\d*|ln_\w+)", Role.NORM),
            module(r"mtp\.fc", Role.MTP_PROJECTION),
            module(r"(?:\w*embeddings?|wte|wpe|relative_attention_bias)", Role.EMBEDDING),
            # matrices of recurrent layers that are no linear maps
            module(r"(?:A_log|dt_bias|\w*conv\w*)", Role.UNKNOWN),
            module(r"(?:layers?|blocks?|h)\.\d+\.\w+", Role.LINEAR),
        ),
        tensors=None,
        ignore=("lm_head",),
    ),
)
