"""GLM-4.5, 4.5-Air, 4.6 and 4.7: grouped-query attention, routed experts, one MTP layer."""

from collections.abc import Iterator

from quantkit.families import decoder, roles
from quantkit.families.config_values import Config, text_config
from quantkit.families.family import FAMILIES, ExpectedTensor, Family
from quantkit.families.kv_shape import head_kv


def _tensors(config: Config, root: str) -> Iterator[ExpectedTensor]:
    return decoder.causal_lm(text_config(config), root, decoder.gqa)


FAMILIES.add(
    "glm4_moe",
    Family(
        name="glm4_moe",
        model_types=("glm4_moe",),
        roles=roles.EXPERTS + roles.KV_SCALES + roles.MLP + roles.GQA + roles.ENDS,
        tensors=_tensors,
        kv_shape=head_kv,
        ignore=roles.IGNORE_ALL_BUT_EXPERTS + roles.IGNORE_MTP_PROJECTION,
        stores_mtp_copies=True,
    ),
)
