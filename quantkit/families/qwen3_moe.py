"""Qwen3-MoE (235B-A22B, 30B-A3B, Coder): grouped-query attention, routed experts alone, no MTP layer."""

from collections.abc import Iterator

from quantkit.checkpoint.file_names import CONFIG_NAME
from quantkit.errors import SourceError
from quantkit.families import decoder, roles
from quantkit.families.config_values import Config, flag, integer, text_config
from quantkit.families.family import FAMILIES, ExpectedTensor, Family, Role
from quantkit.families.kv_shape import head_kv


def _mlp_only_layers(config: Config) -> frozenset[int]:
    """Layers that are dense whatever the step says."""
    layers = config.get("mlp_only_layers") or []
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise SourceError(
            f"mlp_only_layers is {layers!r}, not a list of layers",
            file=CONFIG_NAME,
            remedy="take config.json from the source again",
        )
    return frozenset(layers)


def _decoder_config(config: Config) -> Config:
    """The same model in the keys of the other decoders. transformers 5 writes ``num_local_experts``."""
    dense, step = _mlp_only_layers(config), integer(config, "decoder_sparse_step", 1, at_least=1)
    return {
        **config,
        "n_routed_experts": integer(config, "num_local_experts" if "num_local_experts" in config else "num_experts"),
        "n_shared_experts": 0,
        "mlp_layer_types": [
            "dense" if layer in dense or (layer + 1) % step else "sparse"
            for layer in range(integer(config, "num_hidden_layers"))
        ],
        "use_qk_norm": True,
        "num_nextn_predict_layers": 0,
    }


def _attention(config: Config, prefix: str, layer: int) -> Iterator[ExpectedTensor]:
    yield from decoder.gqa(config, prefix, layer)
    if flag(config, "attention_bias", False):
        yield decoder.plain(f"{prefix}o_proj.bias", (integer(config, "hidden_size"),), Role.ATTENTION)


def _tensors(config: Config, root: str) -> Iterator[ExpectedTensor]:
    return decoder.causal_lm(_decoder_config(text_config(config)), root, _attention, has_router_bias=False)


FAMILIES.add(
    "qwen3_moe",
    Family(
        name="qwen3_moe",
        model_types=("qwen3_moe",),
        roles=roles.EXPERTS + roles.KV_SCALES + roles.MLP + roles.GQA + roles.ENDS,
        tensors=_tensors,
        kv_shape=head_kv,
        ignore=roles.IGNORE_ALL_BUT_EXPERTS,
    ),
)
