"""What an engine keeps beside the checkpoint's own bytes, on one rank.

Latent attention is computed with ``kv_b_proj`` folded into query and output, from copies of it in BF16; with decode
context parallelism sparse attention gathers queries, from copies of ``q_b_proj`` and the key half.
"""

from quantkit.families.family import Role
from quantkit.families.kv_shape import LatentKv
from quantkit.memory.engine_rules import EngineRules
from quantkit.memory.serving import Serving
from quantkit.memory.stage import Stage
from quantkit.tensors import BF16, F16

_BF16_BYTES = 2


def copied_bytes(serving: Serving, stage: Stage, rules: EngineRules) -> int:
    """Bytes that stay for as long as the server runs."""
    shape, parallel = serving.kv_shape, serving.parallel
    if not isinstance(shape, LatentKv):
        return 0
    ways, layer_bytes = parallel.attention_tp, (stage.num_own + stage.num_mtp) * shape.latent_dim * _BF16_BYTES
    held = list(stage.held(serving.groups))
    is_16_bit = all(group.spec.dtype in (BF16, F16) for group in held if group.place.role is Role.KV_B)
    total = 0
    if not (is_16_bit and rules.views_bf16_weights):
        total = -(-layer_bytes * (shape.key_rows + shape.value_rows) // ways)
    if parallel.dcp > 1 and shape.is_sparse:
        query_bytes = sum(group.count * group.spec.num_bytes for group in held if group.place.module == "q_b_proj")
        slices = parallel.dcp if rules.keeps_query_slice else parallel.dcp - 1
        total += query_bytes * slices // ways + layer_bytes * shape.key_rows * parallel.dcp // ways
    return total
