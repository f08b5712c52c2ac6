"""DeepSeek-V3.2: DeepSeek-V3 with a sparse-attention indexer on every layer."""

from collections.abc import Iterator

from quantkit.families import decoder, roles
from quantkit.families.config_values import Config, text_config
from quantkit.families.family import FAMILIES, ExpectedTensor, Family
from quantkit.families.kv_shape import KvShape, latent_kv


def _attention(config: Config, prefix: str, layer: int) -> Iterator[ExpectedTensor]:
    yield from decoder.mla(config, prefix, layer)
    yield from decoder.indexer(config, prefix, optional=False)


def _tensors(config: Config, root: str) -> Iterator[ExpectedTensor]:
    return decoder.causal_lm(text_config(config), root, _attention)


def _kv_shape(config: Config) -> KvShape:
    return latent_kv(config, lambda _, layer: True)


FAMILIES.add(
    "deepseek_v32",
    Family(
        name="deepseek_v32",
        model_types=("deepseek_v32",),
        roles=roles.EXPERTS + roles.KV_SCALES + roles.MLP + roles.MLA + roles.INDEXER + roles.ENDS,
        tensors=_tensors,
        kv_shape=_kv_shape,
        ignore=roles.IGNORE_ALL_BUT_EXPERTS + roles.IGNORE_MTP_PROJECTION,
        stores_mtp_copies=True,
    ),
)
