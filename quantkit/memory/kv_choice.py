"""KV dtype and row layout: what is asked for, completed by the engine's choice on the GPU."""

from quantkit.memory.engine_rules import EngineRules
from quantkit.memory.kv_format import KvDtype, KvFormat, KvLayout, check_format
from quantkit.memory.model import Model
from quantkit.memory.serving import MemoryRequest


def choose_format(model: Model, request: MemoryRequest, rules: EngineRules) -> KvFormat:
    """Raises UsageError for what the engine refuses, and for a layout that the model does not have."""
    shape = model.kv_shape
    rules.check_request(shape, request)
    own_dtype = rules.kv_dtype(shape, request, model.family.name)
    dtype = request.kv_dtype or (own_dtype if request.kv_layout is None else KvDtype.FP8)
    own_layout = rules.sparse_layout(request, dtype) if shape.is_sparse else KvLayout.RAW
    options = {"kv_dtype": "--kv-dtype", "kv_layout": "--kv-layout"}
    given = dict.fromkeys(
        "the log" if field in request.logged else option
        for field, option in options.items()
        if getattr(request, field) is not None
    )
    whose = f"{request.engine} on {request.gpu.architecture}"
    found = KvFormat(
        dtype=dtype,
        layout=request.kv_layout or own_layout,
        chosen_by=f"{' and '.join(given)}, the rest by {whose}" if given else whose,
    )
    check_format(shape, found)
    return found
