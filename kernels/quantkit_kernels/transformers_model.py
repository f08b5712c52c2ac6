"""A converted checkpoint in transformers' own model, without being decompressed.

The model is built without memory (``torch.device("meta")``); its experts become ``Int4Experts``, Linear layers that the
checkpoint stores as INT4 become ``Int4Linear``, and everything else is loaded as it is.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit_kernels.checkpoint import Tensors
from quantkit_kernels.module_parts import PARTS, Device
from quantkit_kernels.modules import PROJECTIONS, Int4Experts, Int4Linear

EXPERTS = ("GlmMoeDsaExperts", "Glm4MoeExperts", "DeepseekV3Experts")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def patch(model: nn.Module, directory: str | Path, *, device: Device | Mapping[str, Device] = None) -> nn.Module:
    """Fill ``model`` with the checkpoint in ``directory``; INT4 weights stay INT4. Returns the model, in eval mode.

    ``model``: GLM-MoE-DSA, GLM-4 MoE or DeepSeek-V3 of transformers, usually built on the meta device, in BF16 or FP16;
    parameters that are not INT4 get the dtypes that it has. ``device``: where everything goes (by default where the
    model is, or the CPU), or a device map as accelerate takes it (names of modules to devices, "" for the rest), whose
    hooks then move activations along. For inference only. Raises ValueError for models and experts that are not known,
    for files and tensors that the checkpoint lacks, for weights of another kind than quantkit's INT4, and for devices
    that are not there, modules that the map leaves out and names that the model has not.
    """
    _check_model(model)
    if isinstance(device, Mapping):
        from accelerate import dispatch_model  # noqa: PLC0415 (only a map needs it)
    with Tensors(Path(directory)) as tensors:
        replaced = {name: module for name, module in model.named_modules() if _is_int4(name, module, tensors)}
        device_map = _device_map(model, device, replaced)
        places = _Places(device_map)
        for name, module in replaced.items():
            make = _linear if isinstance(module, nn.Linear) else _experts
            _replace(model, name, make(name, module, tensors, places))
        _load_rest(model, tensors, places)
    if isinstance(device, Mapping):
        skipped = getattr(model, "_skip_keys_device_placement", None)
        model = dispatch_model(
            model, {name: str(place) for name, place in device_map.items()}, skip_keys=skipped, force_hooks=True
        )
    return model.eval()


def _check_model(model: object) -> None:
    """It is one of transformers', and its experts are known."""
    if not isinstance(model, nn.Module) or not hasattr(model, "config") or not hasattr(model, "_init_weights"):
        raise ValueError(f"patch takes a model of transformers, not {type(model).__name__}")
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, Int4Experts | Int4Linear):
            raise ValueError(f"{name} is {kind}: the model is patched already")
        if kind.endswith("Experts") and kind not in EXPERTS:
            raise ValueError(f"{name} is {kind}, and patch takes the experts {', '.join(EXPERTS)}")


def _is_int4(name: str, module: nn.Module, tensors: Tensors) -> bool:
    if type(module).__name__ in EXPERTS:
        if not any(one.startswith(f"{name}.") and one.endswith(".weight_packed") for one in tensors.files):
            raise ValueError(f"{name}: the checkpoint has no experts in INT4")
        return True
    return isinstance(module, nn.Linear) and f"{name}.weight_packed" in tensors


def _device_map(
    model: nn.Module, device: Device | Mapping[str, Device], replaced: Mapping[str, nn.Module]
) -> dict[str, torch.device]:
    """Names to devices that are there; ``replaced``: modules that are in one place."""
    wanted = dict(device) if isinstance(device, Mapping) else {"": device}
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    known = {*dict(model.named_modules()), *tensors}
    for name in wanted:
        for whole in replaced:
            if name.startswith(f"{whole}."):
                raise ValueError(f"the device map has {name!r}, and {whole} is in one place")
        if name not in known:
            raise ValueError(f"the device map has {name!r}, which the model has not")
    return {name: _device(one, tensors.values()) for name, one in wanted.items()}


def _device(device: Device, tensors: Iterable[Tensor]) -> torch.device:
    if device is None:
        found = {str(one.device) for one in tensors if not one.is_meta}
        if len(found) > 1:
            raise ValueError(f"the model is on {', '.join(sorted(found))}: name a device")
        device = found.pop() if found else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{device!r} is no device: {error}") from error
    if place.type == "meta":
        raise ValueError("on meta a model has no memory: name a device that has")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"the model cannot go to {place}: torch sees {torch.cuda.device_count() or 'no'} GPU")
    return place


class _Places:
    """Where modules go: to the device of the longest name in a map which they are, or are part of."""

    def __init__(self, device_map: Mapping[str, Device]) -> None:
        self.device_map = device_map

    def of(self, name: str) -> Device:
        parts = name.split(".")
        for length in range(len(parts), -1, -1):
            prefix = ".".join(parts[:length])
            if prefix in self.device_map:
                return self.device_map[prefix]
        raise ValueError(f"the device map has no place for {name}")


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, new)


def _experts(name: str, module: Any, tensors: Tensors, places: _Places) -> Int4Experts:
    if not isinstance(module.act_fn, nn.SiLU) and type(module.act_fn).__name__ != "SiLUActivation":
        raise ValueError(f"{name}: the kernel has SiLU, not {type(module.act_fn).__name__}")
    _check_dtype(name, module.gate_up_proj)
    sizes = (module.num_experts, module.hidden_dim, module.intermediate_dim)
    with _named(name):
        experts = Int4Experts(*sizes, group_size=tensors.group_size, device=places.of(name))
    names = [f"{projection}.{part}" for projection in PROJECTIONS for part in PARTS]
    tensors.check_taken(name, (f"{name}.{expert}.{one}" for expert in range(module.num_experts) for one in names))
    for expert in range(module.num_experts):
        with _named(f"{name}.{expert}"):
            experts.load_expert(expert, {one: tensors[f"{name}.{expert}.{one}"] for one in names})
    return experts


def _linear(name: str, module: nn.Linear, tensors: Tensors, places: _Places) -> Int4Linear:
    _check_dtype(name, module.weight)
    device = places.of(name)
    parts = (*PARTS, "bias") if module.bias is not None else PARTS
    tensors.check_taken(name, (f"{name}.{part}" for part in parts))
    bias = tensors[f"{name}.bias"] if module.bias is not None else None
    if bias is not None:
        bias = bias.to(_dtype(f"{name}.bias", bias, module.bias.dtype))
    with _named(name):
        linear = Int4Linear(
            module.in_features, module.out_features, group_size=tensors.group_size, bias=bias, device=device
        )
        linear.load({part: tensors[f"{name}.{part}"] for part in PARTS})
    return linear


def _check_dtype(name: str, weight: Tensor) -> None:
    if weight.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"{name} is {weight.dtype}: build the model in BF16 or FP16 (dtype=torch.bfloat16)")


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Puts the module's name before what is wrong with it."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(name):
            raise
        raise ValueError(f"{name}: {error}") from error


def _load_rest(model: nn.Module, tensors: Tensors, places: _Places) -> None:
    """Parameters and persistent buffers by name; what is computed and not stored is computed again."""
    for module_name, module in model.named_modules():
        if isinstance(module, Int4Experts | Int4Linear):
            continue
        for leaf, tensor in [*module.named_parameters(recurse=False), *_stored_buffers(module)]:
            name = f"{module_name}.{leaf}" if module_name else leaf
            source = tensors[_tied(model, name, tensors)]
            if source.shape != tensor.shape:
                raise ValueError(f"{name} is {tuple(source.shape)}, the model wants {tuple(tensor.shape)}")
            value = source.to(places.of(name), _dtype(name, source, _wanted(model, name, tensor)))
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(module, leaf, nn.Parameter(value, requires_grad=False) if is_parameter else value)
        if module._non_persistent_buffers_set:
            _compute_buffers(model, module, places.of(module_name))


def _dtype(name: str, source: Tensor, wanted: torch.dtype) -> torch.dtype:
    """``wanted``. Raises ValueError for numbers that a cast would make others of."""
    if source.dtype.is_floating_point and source.dtype.itemsize == 1:
        raise ValueError(f"{name} is {source.dtype}, and patch takes no FP8 weights: convert with --rest bf16")
    if source.dtype != wanted and not (source.dtype in FLOATS and wanted in FLOATS):
        raise ValueError(f"{name} is {source.dtype}, the model wants {wanted}")
    return wanted


def _wanted(model: Any, name: str, tensor: Tensor) -> torch.dtype:
    """The dtype of the model's own, or float32 where transformers' loader would keep it: the router's correction."""
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if tensor.dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    is_kept = tensor.dtype in FLOATS and any(f".{one}." in f".{name}." for one in kept)
    return torch.float32 if is_kept else tensor.dtype


def _stored_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for leaf, buffer in module.named_buffers(recurse=False):
        if leaf not in module._non_persistent_buffers_set:
            yield leaf, buffer


def _tied(model: Any, name: str, tensors: Tensors) -> str:
    """The head has the embedding's name where they are one."""
    if name in tensors or not getattr(model.config, "tie_word_embeddings", False):
        return name
    return str((getattr(model, "_tied_weights_keys", None) or {}).get(name, name))


def _compute_buffers(model: Any, module: nn.Module, device: Device) -> None:
    """Rotary frequencies and the like: transformers knows how to fill what was built without memory."""
    empty = [leaf for leaf, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
    for leaf in empty:
        buffer = getattr(module, leaf)
        module.register_buffer(leaf, torch.full_like(buffer, float("nan"), device=device), persistent=False)
    if empty:
        model._init_weights(module)
    for leaf, buffer in module.named_buffers(recurse=False):
        if leaf in module._non_persistent_buffers_set:
            if leaf in empty and buffer.isnan().any():
                raise ValueError(f"{type(module).__name__}.{leaf} is not stored, and nothing computes it")
            module.register_buffer(leaf, buffer.to(device), persistent=False)
