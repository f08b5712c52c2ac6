"""The blocks that decoder families are made of, as lists of tensors.

Shapes are [out, in]. Names, biases and copies: as in published checkpoints.
"""

from collections.abc import Callable, Iterator

from quantkit.checkpoint.file_names import CONFIG_NAME
from quantkit.errors import SourceError
from quantkit.families.config_values import MOST_LAYERS_TIMES_EXPERTS, Config, flag, integer, per_layer
from quantkit.families.family import ExpectedTensor, Role
from quantkit.module_names import layer_name
from quantkit.tensors import BF16, F32

Attention = Callable[[Config, str, int], Iterator[ExpectedTensor]]


def linear(module: str, rows: int, cols: int, role: Role) -> ExpectedTensor:
    """A matrix that the family's FP8 checkpoints store as FP8."""
    return ExpectedTensor(name=f"{module}.weight", shape=(rows, cols), dtype=BF16, role=role, is_fp8=True)


def plain(name: str, shape: tuple[int, ...], role: Role, *, optional: bool = False) -> ExpectedTensor:
    """A tensor that stays BF16 in every checkpoint."""
    return ExpectedTensor(name=name, shape=shape, dtype=BF16, role=role, optional=optional)


def norm(module: str, width: int) -> ExpectedTensor:
    """The weight of an RMS norm."""
    return plain(f"{module}.weight", (width,), Role.NORM)


def mla(config: Config, prefix: str, layer: int) -> Iterator[ExpectedTensor]:
    """Multi-head latent attention; ``q_proj`` where the query has no low rank."""
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads", at_least=1)
    nope, rope = integer(config, "qk_nope_head_dim"), integer(config, "qk_rope_head_dim")
    kv_rank, value_dim = integer(config, "kv_lora_rank"), integer(config, "v_head_dim")
    q_rank = integer(config, "q_lora_rank", 0)
    has_bias = flag(config, "attention_bias", False)
    biased: list[tuple[str, int]] = [("kv_a_proj_with_mqa", kv_rank + rope), ("o_proj", hidden)]
    if q_rank:
        yield linear(f"{prefix}q_a_proj", q_rank, hidden, Role.ATTENTION)
        yield norm(f"{prefix}q_a_layernorm", q_rank)
        yield linear(f"{prefix}q_b_proj", heads * (nope + rope), q_rank, Role.ATTENTION)
        biased.append(("q_a_proj", q_rank))
    else:
        yield linear(f"{prefix}q_proj", heads * (nope + rope), hidden, Role.ATTENTION)
    yield linear(f"{prefix}kv_a_proj_with_mqa", kv_rank + rope, hidden, Role.ATTENTION)
    yield norm(f"{prefix}kv_a_layernorm", kv_rank)
    yield linear(f"{prefix}kv_b_proj", heads * (nope + value_dim), kv_rank, Role.KV_B)
    yield linear(f"{prefix}o_proj", hidden, heads * value_dim, Role.ATTENTION)
    if has_bias:
        for leaf, width in biased:
            yield plain(f"{prefix}{leaf}.bias", (width,), Role.ATTENTION)


def gqa(config: Config, prefix: str, layer: int) -> Iterator[ExpectedTensor]:
    """Grouped-query attention with biases on q, k and v only."""
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads", at_least=1)
    head_dim = integer(config, "head_dim", hidden // heads)
    key_rows = integer(config, "num_key_value_heads", heads) * head_dim
    for leaf, rows in (("q_proj", heads * head_dim), ("k_proj", key_rows), ("v_proj", key_rows)):
        yield linear(f"{prefix}{leaf}", rows, hidden, Role.ATTENTION)
        if flag(config, "attention_bias", False):
            yield plain(f"{prefix}{leaf}.bias", (rows,), Role.ATTENTION)
    yield linear(f"{prefix}o_proj", hidden, heads * head_dim, Role.ATTENTION)
    if flag(config, "use_qk_norm", False):
        yield norm(f"{prefix}q_norm", head_dim)
        yield norm(f"{prefix}k_norm", head_dim)


def indexer(config: Config, prefix: str, *, optional: bool) -> Iterator[ExpectedTensor]:
    """Lightning indexer of sparse attention. Its norm is F32 at run time and BF16 in the files."""
    hidden, q_rank = integer(config, "hidden_size"), integer(config, "q_lora_rank")
    heads, head_dim = integer(config, "index_n_heads"), integer(config, "index_head_dim")
    for leaf, shape, role, is_fp8 in (
        ("wq_b.weight", (heads * head_dim, q_rank), Role.INDEXER, True),
        ("wk.weight", (head_dim, hidden), Role.INDEXER_FIXED, True),
        ("k_norm.weight", (head_dim,), Role.INDEXER_FIXED, False),
        ("k_norm.bias", (head_dim,), Role.INDEXER_FIXED, False),
        ("weights_proj.weight", (heads, hidden), Role.INDEXER_FIXED, False),
    ):
        yield ExpectedTensor(
            name=f"{prefix}indexer.{leaf}",
            shape=shape,
            dtype=BF16,
            role=role,
            is_fp8=is_fp8,
            optional=optional,
        )


def gated_mlp(prefix: str, hidden: int, width: int, role: Role) -> Iterator[ExpectedTensor]:
    """Gate, up and down."""
    yield linear(f"{prefix}gate_proj", width, hidden, role)
    yield linear(f"{prefix}up_proj", width, hidden, role)
    yield linear(f"{prefix}down_proj", hidden, width, role)


def moe(config: Config, prefix: str, *, has_router_bias: bool = True) -> Iterator[ExpectedTensor]:
    """Router, with its F32 bias where there is one, routed experts one by one, and the shared expert."""
    hidden, num_experts = integer(config, "hidden_size"), integer(config, "n_routed_experts")
    width, num_shared = integer(config, "moe_intermediate_size"), integer(config, "n_shared_experts", 0)
    yield plain(f"{prefix}gate.weight", (num_experts, hidden), Role.ROUTER)
    if has_router_bias:
        bias = f"{prefix}gate.e_score_correction_bias"
        yield ExpectedTensor(name=bias, shape=(num_experts,), dtype=F32, role=Role.ROUTER_BIAS)
    for expert in range(num_experts):
        yield from gated_mlp(f"{prefix}experts.{expert}.", hidden, width, Role.ROUTED_EXPERT)
    if num_shared:
        yield from gated_mlp(f"{prefix}shared_experts.", hidden, num_shared * width, Role.SHARED_EXPERT)


def mtp(config: Config, prefix: str) -> Iterator[ExpectedTensor]:
    """What a draft layer has beside a decoder layer; some lack its copies of embedding and head."""
    hidden, vocabulary = integer(config, "hidden_size"), integer(config, "vocab_size")
    yield plain(f"{prefix}embed_tokens.weight", (vocabulary, hidden), Role.EMBEDDING, optional=True)
    yield norm(f"{prefix}enorm", hidden)
    yield norm(f"{prefix}hnorm", hidden)
    yield plain(f"{prefix}eh_proj.weight", (hidden, 2 * hidden), Role.MTP_PROJECTION)
    yield norm(f"{prefix}shared_head.norm", hidden)
    yield plain(f"{prefix}shared_head.head.weight", (vocabulary, hidden), Role.HEAD, optional=True)


def is_sparse(config: Config, layer: int) -> bool:
    """Whether a layer has routed experts; MTP layers always do."""
    num_layers = integer(config, "num_hidden_layers")
    if not integer(config, "n_routed_experts"):
        return False
    if layer >= num_layers:
        return True
    kinds = per_layer(config, "mlp_layer_types", num_layers)
    if kinds is not None:
        return bool(kinds[layer] == "sparse")
    return layer >= integer(config, "first_k_dense_replace", 0) and not layer % integer(
        config, "moe_layer_freq", 1, at_least=1
    )


def causal_lm(
    config: Config, root: str, attention: Attention, *, has_router_bias: bool = True
) -> Iterator[ExpectedTensor]:
    """A whole decoder under ``root``, MTP layers at the end; the head lies beside ``model.``."""
    hidden, vocabulary = integer(config, "hidden_size"), integer(config, "vocab_size")
    num_layers = integer(config, "num_hidden_layers")
    if num_layers * integer(config, "n_routed_experts", 0) > MOST_LAYERS_TIMES_EXPERTS:
        raise SourceError(
            f"{num_layers} layers of {config['n_routed_experts']} experts are more than any model has",
            file=CONFIG_NAME,
            remedy="take config.json from the source again",
        )
    yield plain(f"{root}embed_tokens.weight", (vocabulary, hidden), Role.EMBEDDING)
    for layer in range(num_layers + integer(config, "num_nextn_predict_layers", 0)):
        prefix = f"{layer_name(root, layer)}."
        if layer >= num_layers:
            yield from mtp(config, prefix)
        yield norm(f"{prefix}input_layernorm", hidden)
        yield from attention(config, f"{prefix}self_attn.", layer)
        yield norm(f"{prefix}post_attention_layernorm", hidden)
        if is_sparse(config, layer):
            yield from moe(config, f"{prefix}mlp.", has_router_bias=has_router_bias)
        else:
            yield from gated_mlp(f"{prefix}mlp.", hidden, integer(config, "intermediate_size"), Role.DENSE_MLP)
    yield norm(f"{root}norm", hidden)
    head_prefix = root.removesuffix("model.") if root == "model." or root.endswith(".model.") else ""
    is_tied = flag(config, "tie_word_embeddings", False)
    yield plain(f"{head_prefix}lm_head.weight", (vocabulary, hidden), Role.HEAD, optional=is_tied)
