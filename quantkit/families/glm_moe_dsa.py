"""GLM-5, 5.1, 5.2 and 5.3: latent attention, sparse-attention indexer, routed experts, one MTP layer."""

from collections.abc import Iterator

from quantkit.families import decoder, roles
from quantkit.families.config_values import Config, integer, per_layer, text_config
from quantkit.families.family import FAMILIES, ExpectedTensor, Family
from quantkit.families.kv_shape import KvShape, latent_kv


def has_indexer(config: Config, layer: int) -> bool:
    """Whether a layer chooses its own tokens; others reuse an earlier choice. MTP layers always choose."""
    num_layers = integer(config, "num_hidden_layers")
    if layer >= num_layers:
        return True
    kinds = per_layer(config, "indexer_types", num_layers)
    if kinds is not None:
        return bool(kinds[layer] == "full")
    pattern = per_layer(config, "index_topk_pattern", num_layers)
    if pattern is not None:
        return bool(pattern[layer] != "S")
    offset = integer(config, "index_skip_topk_offset", 0)
    return max(layer - offset + 1, 0) % max(integer(config, "index_topk_freq", 1), 1) == 0


def _attention(config: Config, prefix: str, layer: int) -> Iterator[ExpectedTensor]:
    yield from decoder.mla(config, prefix, layer)
    # some checkpoints carry weights on layers that never run them
    yield from decoder.indexer(config, prefix, optional=not has_indexer(config, layer))


def _tensors(config: Config, root: str) -> Iterator[ExpectedTensor]:
    return decoder.causal_lm(text_config(config), root, _attention)


def _kv_shape(config: Config) -> KvShape:
    return latent_kv(config, has_indexer)


FAMILIES.add(
    "glm_moe_dsa",
    Family(
        name="glm_moe_dsa",
        model_types=("glm_moe_dsa",),
        roles=roles.EXPERTS + roles.KV_SCALES + roles.MLP + roles.MLA + roles.INDEXER + roles.ENDS,
        tensors=_tensors,
        kv_shape=_kv_shape,
        ignore=roles.IGNORE_ALL_BUT_EXPERTS + roles.IGNORE_MTP_PROJECTION,
    ),
)
