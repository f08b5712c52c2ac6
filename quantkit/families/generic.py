"""Any architecture without a file of its own: roles by customary names, tensors by the headers alone.

What is left inside a numbered layer is ``linear``; whether a tensor is a matrix, its header says.
"""

from quantkit.checkpoint.file_names import CONFIG_NAME
from quantkit.errors import SourceError
from quantkit.families import roles
from quantkit.families.config_values import Config, per_layer
from quantkit.families.family import FAMILIES, Family, Role
from quantkit.families.kv_shape import KvShape, head_kv, latent_kv
from quantkit.families.roles import module

# keys of layers that keep something else than keys and values of every token
_OTHER_STATE = ("linear_attn_config", "linear_num_value_heads", "full_attention_interval", "mamba_d_state", "ssm_cfg")


def _kv_shape(config: Config) -> KvShape:
    """Every layer alike, by the customary keys; a config that hints at anything else is refused."""
    hints = [key for key in (*_OTHER_STATE, "index_topk", "index_n_heads", "sliding_window") if config.get(key)]
    kinds = per_layer(config, "layer_types", 0) or ()
    if hints or any(kind != "full_attention" for kind in kinds):
        raise SourceError(
            f"{hints[0] if hints else 'layer_types'} says that layers differ in what they keep of a token, so the KV "
            "cache of this unknown family is not known",
            file=CONFIG_NAME,
            remedy="add the architecture as a family",
        )
    return latent_kv(config) if config.get("kv_lora_rank") else head_kv(config)


GENERIC = FAMILIES.add(
    "generic",
    Family(
        name="generic",
        model_types=(),
        roles=(
            module(r"experts\.(?:\d+\.)?\w+", Role.ROUTED_EXPERT),
            *roles.EXPERTS,
            *roles.KV_SCALES,
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
        kv_shape=_kv_shape,
        ignore=("lm_head",),
    ),
)
