"""GLM-4.7-Flash: latent attention, routed experts, one MTP layer."""

from collections.abc import Iterator

from quantkit.families import decoder, roles
from quantkit.families.config_values import Config, text_config
from quantkit.families.family import FAMILIES, ExpectedTensor, Family
from quantkit.families.kv_shape import latent_kv


def _tensors(config: Config, root: str) -> Iterator[ExpectedTensor]:
    return decoder.causal_lm(text_config(config), root, decoder.mla)


FAMILIES.add(
    "glm4_moe_lite",
    Family(
        name="glm4_moe_lite",
        model_types=("glm4_moe_lite",),
        roles=roles.EXPERTS + roles.KV_SCALES + roles.MLP + roles.MLA + roles.ENDS,
        tensors=_tensors,
        kv_shape=latent_kv,
        ignore=roles.IGNORE_ALL_BUT_EXPERTS + roles.IGNORE_MTP_PROJECTION,
        stores_mtp_copies=True,
    ),
)
