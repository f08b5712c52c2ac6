"""A converted checkpoint in transformers' own model, without being decompressed.

The model is built without memory (``torch.device("meta")``); its experts become ``Int4Experts``, Linear layers that the
checkpoint stores as INT4 become ``Int4Linear``, and everything else is loaded as it is.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit_kernels.module_parts import PARTS, Device
from quantkit_kernels.modules import PROJECTIONS, Int4Experts, Int4Linear

EXPERTS = ("GlmMoeDsaExperts", "Glm4MoeExperts", "DeepseekV3Experts")
_INDEX = "model.safetensors.index.json"
_SCHEME = {
    "format": "pack-quantized",
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "actorder": None,
    "input_activations": None,
}


def patch(model: nn.Module, directory: str | Path, *, device: Device | Mapping[str, Device] = None) -> nn.Module:
    """Fill ``model`` with the checkpoint in ``directory``; INT4 weights stay INT4. Returns the model, in eval mode.

    ``model``: GLM-MoE-DSA, GLM-4 MoE or DeepSeek-V3 of transformers, usually built on the meta device; ``device``:
    where everything goes, or a device map as accelerate takes it (names of modules to devices, "" for the rest), whose
    hooks then move activations along. Raises ValueError for experts that are not known, for tensors that the checkpoint
    lacks, for INT4 weights of another kind than quantkit's, and for modules that the map leaves out.
    """
    places = _Places(device)
    with _Tensors(Path(directory)) as tensors:
        for name, module in list(model.named_modules()):
            if type(module).__name__ in EXPERTS:
                _replace(model, name, _experts(name, module, tensors, places))
            elif isinstance(module, nn.Linear) and f"{name}.weight_packed" in tensors:
                _replace(model, name, _linear(name, module, tensors, places))
        _load_rest(model, tensors, places)
    if isinstance(device, Mapping):
        from accelerate import dispatch_model  # noqa: PLC0415 (only a map needs it)

        skipped = getattr(model, "_skip_keys_device_placement", None)
        model = dispatch_model(model, dict(device), skip_keys=skipped, force_hooks=True)
    return model.eval()


class _Places:
    """Where modules go: one device, or that of the longest name in a map which they are, or are part of."""

    def __init__(self, device: Device | Mapping[str, Device]) -> None:
        self.device_map = device if isinstance(device, Mapping) else {"": device}

    def of(self, name: str) -> Device:
        parts = name.split(".")
        for length in range(len(parts), -1, -1):
            prefix = ".".join(parts[:length])
            if prefix in self.device_map:
                return self.device_map[prefix]
        raise ValueError(f"the device map has no place for {name}")


class _Tensors:
    """The tensors of a checkpoint by name; a file is opened when it is first needed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        index = directory / _INDEX
        if not index.is_file():
            raise ValueError(f"{index} is not there: this is no converted checkpoint")
        self.files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        self.group_size = _group_size(directory / "config.json")
        self._stack, self._open = ExitStack(), dict[str, Any]()

    def __enter__(self) -> "_Tensors":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def check_taken(self, module: str, taken: Iterable[str]) -> None:
        """Raise ValueError for a tensor of a module beside those that it takes: zero points, an order of columns."""
        for name in sorted({name for name in self.files if name.startswith(f"{module}.")} - set(taken)):
            raise ValueError(f"{name} is in the checkpoint, and nothing here takes it")

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.files:
            raise ValueError(f"{name} is not in the checkpoint")
        file = self.files[name]
        if file not in self._open:
            from safetensors import safe_open  # noqa: PLC0415 (only a checkpoint needs it)

            self._open[file] = self._stack.enter_context(safe_open(self.directory / file, framework="pt"))
        tensor: Tensor = self._open[file].get_tensor(name)
        return tensor


def _group_size(path: Path) -> int:
    """That of every weight. Raises ValueError for weights that mean anything else than the kernels compute."""
    section = json.loads(path.read_text()).get("quantization_config") or {}
    groups = section.get("config_groups") or {}
    sizes: set[Any] = {(group.get("weights") or {}).get("group_size") for group in groups.values()}
    if len(sizes) != 1:
        raise ValueError(f"{path} names no single INT4 group size: {sorted(map(str, sizes))}")
    for name, group in groups.items():
        weights = group.get("weights") or {}
        found = {"format": group.get("format") or section.get("format")}
        found |= {key: weights.get(key) for key in ("num_bits", "type", "symmetric", "strategy", "actorder")}
        found["input_activations"] = group.get("input_activations")
        for key, wanted in _SCHEME.items():
            if found[key] != wanted:
                raise ValueError(f"{path}: {name} has {key} {found[key]!r}, and the kernels are for {wanted!r}")
    size: int = sizes.pop()
    return size


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, new)


def _experts(name: str, module: Any, tensors: _Tensors, places: _Places) -> Int4Experts:
    if not isinstance(module.act_fn, nn.SiLU) and type(module.act_fn).__name__ != "SiLUActivation":
        raise ValueError(f"{name}: the kernel has SiLU, not {type(module.act_fn).__name__}")
    sizes = (module.num_experts, module.hidden_dim, module.intermediate_dim)
    experts = Int4Experts(*sizes, group_size=tensors.group_size, device=places.of(name))
    names = [f"{projection}.{part}" for projection in PROJECTIONS for part in PARTS]
    tensors.check_taken(name, (f"{name}.{expert}.{one}" for expert in range(module.num_experts) for one in names))
    for expert in range(module.num_experts):
        with _named(f"{name}.{expert}"):
            experts.load_expert(expert, {one: tensors[f"{name}.{expert}.{one}"] for one in names})
    return experts


def _linear(name: str, module: nn.Linear, tensors: _Tensors, places: _Places) -> Int4Linear:
    device = places.of(name)
    parts = (*PARTS, "bias") if module.bias is not None else PARTS
    tensors.check_taken(name, (f"{name}.{part}" for part in parts))
    bias = tensors[f"{name}.bias"].to(device) if module.bias is not None else None
    linear = Int4Linear(
        module.in_features, module.out_features, group_size=tensors.group_size, bias=bias, device=device
    )
    with _named(name):
        linear.load({part: tensors[f"{name}.{part}"] for part in PARTS})
    return linear


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Puts the module's name before what is wrong with it."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(name):
            raise
        raise ValueError(f"{name}: {error}") from error


def _load_rest(model: nn.Module, tensors: _Tensors, places: _Places) -> None:
    """Parameters and persistent buffers by name; what is computed and not stored is computed again."""
    for module_name, module in model.named_modules():
        if isinstance(module, Int4Experts | Int4Linear):
            continue
        for leaf, tensor in [*module.named_parameters(recurse=False), *_stored_buffers(module)]:
            name = f"{module_name}.{leaf}" if module_name else leaf
            source = tensors[_tied(model, name, tensors)]
            if source.shape != tensor.shape:
                raise ValueError(f"{name} is {tuple(source.shape)}, the model wants {tuple(tensor.shape)}")
            value = source.to(places.of(name))
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(module, leaf, nn.Parameter(value, requires_grad=False) if is_parameter else value)
        if module._non_persistent_buffers_set:
            _compute_buffers(model, module, places.of(module_name))


def _stored_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for leaf, buffer in module.named_buffers(recurse=False):
        if leaf not in module._non_persistent_buffers_set:
            yield leaf, buffer


def _tied(model: Any, name: str, tensors: _Tensors) -> str:
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
