"""What a layer keeps of every token for later attention: the numbers that a KV cache is sized by."""

from collections.abc import Callable
from dataclasses import dataclass

from quantkit.families.config_values import Config, integer

HasIndexer = Callable[[Config, int], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentKv:
    """Latent attention (MLA): one compressed row a token and layer, shared by all heads.

    ``latent_dim`` + ``rope_dim`` values a row; on ``index_layers``, of the decoder, the sparse-attention indexer (DSA)
    keeps a key of ``index_dim`` values. ``key_rows`` and ``value_rows``: the rows of ``kv_b_proj``, of all heads,
    which engines keep a second time in 16 bits.
    """

    latent_dim: int
    rope_dim: int
    key_rows: int
    value_rows: int
    index_dim: int = 0
    index_layers: frozenset[int] = frozenset()

    @property
    def is_sparse(self) -> bool:
        """Whether an indexer chooses the tokens that attention reads."""
        return bool(self.index_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadKv:
    """Grouped-query attention: a key and a value of ``head_dim`` for every KV head, token and layer."""

    num_kv_heads: int
    head_dim: int

    @property
    def is_sparse(self) -> bool:
        """No indexer is known for it."""
        return False


KvShape = LatentKv | HeadKv


def latent_kv(config: Config, has_indexer: HasIndexer | None = None) -> LatentKv:
    """Of a text config with latent attention. ``has_indexer``: whether a layer has an indexer of its own."""
    heads = integer(config, "num_attention_heads", at_least=1)
    layers = range(0 if has_indexer is None else integer(config, "num_hidden_layers"))
    return LatentKv(
        latent_dim=integer(config, "kv_lora_rank", at_least=1),
        rope_dim=integer(config, "qk_rope_head_dim"),
        key_rows=heads * integer(config, "qk_nope_head_dim"),
        value_rows=heads * integer(config, "v_head_dim"),
        index_dim=0 if has_indexer is None else integer(config, "index_head_dim", at_least=1),
        index_layers=frozenset(layer for layer in layers if has_indexer is not None and has_indexer(config, layer)),
    )


def head_kv(config: Config) -> HeadKv:
    """Of a text config with grouped-query attention."""
    heads = integer(config, "num_attention_heads", at_least=1)
    return HeadKv(
        num_kv_heads=integer(config, "num_key_value_heads", heads, at_least=1),
        head_dim=integer(config, "head_dim", integer(config, "hidden_size") // heads, at_least=1),
    )
