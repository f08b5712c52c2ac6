"""What an engine keeps beside the checkpoint's own bytes, on one rank.

Latent attention is computed with ``kv_b_proj`` folded into query and output, from copies of it in BF16; with decode
context parallelism sparse attention gathers queries, from copies of ``q_b_proj`` and the key half.
Facts: SGLang 0.5.23 and vLLM 0.33.
"""

from collections.abc import Iterable

from quantkit.engines.parallel import EngineName, Parallel
from quantkit.families.family import Role
from quantkit.families.kv_shape import KvShape, LatentKv
from quantkit.memory.tensor_groups import TensorGroup
from quantkit.memory.weights import Stage
from quantkit.tensors import BF16

_BF16_BYTES = 2


def copied_bytes(
    groups: Iterable[TensorGroup],
    shape: KvShape,
    stage: Stage,
    parallel: Parallel,
    engine: EngineName,
    *,
    with_mtp: bool,
) -> int:
    """Bytes that stay for as long as the server runs."""
    if not isinstance(shape, LatentKv):
        return 0
    num_layers = stage.last - stage.first + (shape.num_mtp_layers if with_mtp and stage.is_last else 0)
    ways = parallel.attention_tp
    key_bytes = num_layers * shape.key_rows * shape.latent_dim * _BF16_BYTES
    value_bytes = num_layers * shape.value_rows * shape.latent_dim * _BF16_BYTES
    held = [group for group in groups if stage.holds(group.place, with_mtp=with_mtp)]
    # vLLM looks at BF16 weights from another side and copies others; SGLang always copies
    is_viewed = engine == "vllm" and all(group.spec.dtype == BF16 for group in held if group.place.role is Role.KV_B)
    total = 0 if is_viewed else -(-(key_bytes + value_bytes) // ways)
    if parallel.dcp > 1 and shape.is_sparse:
        query_bytes = sum(group.count * group.spec.num_bytes for group in held if group.place.module == "q_b_proj")
        # SGLang keeps its own slice beside the gathered ones
        slices = parallel.dcp if engine == "sglang" else parallel.dcp - 1
        total += query_bytes * slices // ways + key_bytes * parallel.dcp // ways
    return total


def draft_ends_bytes(vocabulary: int, hidden: int, parallel: Parallel) -> int:
    """An embedding and a head that the MTP layer is built with, until it is given the model's own."""
    matrix = vocabulary * hidden * _BF16_BYTES
    return -(-matrix // parallel.attention_tp) + -(-matrix // parallel.tp)


def load_transient_bytes(largest_layer_expert_bytes: int, engine: EngineName) -> int:
    """Marlin's repacking of INT4 experts, layer by layer: SGLang one of two matrices at a time, vLLM both."""
    return largest_layer_expert_bytes * 2 // 3 if engine == "sglang" else largest_layer_expert_bytes
