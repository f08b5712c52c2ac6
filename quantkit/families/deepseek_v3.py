"""DeepSeek-V3 and R1, and Kimi K2, which has the same architecture: latent attention, routed experts.

Kimi K2 has no MTP layer; its Thinking checkpoint is INT4 as published.
"""

from collections.abc import Iterator

from quantkit.families import decoder, roles
from quantkit.families.config_values import Config, text_config
from quantkit.families.family import FAMILIES, ExpectedTensor, Family
from quantkit.families.kv_shape import latent_kv


def _tensors(config: Config, root: str) -> Iterator[ExpectedTensor]:
    return decoder.causal_lm(text_config(config), root, decoder.mla)


FAMILIES.add(
    "deepseek_v3",
    Family(
        name="deepseek_v3",
        model_types=("deepseek_v3", "kimi_k2"),
        roles=roles.EXPERTS + roles.KV_SCALES + roles.MLP + roles.MLA + roles.ENDS,
        tensors=_tensors,
        kv_shape=latent_kv,
        ignore=roles.IGNORE_ALL_BUT_EXPERTS + roles.IGNORE_MTP_PROJECTION,
        stores_mtp_copies=True,
    ),
)
