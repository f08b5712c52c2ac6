"""A converted checkpoint's tensors by name; what is not there, or means something else, is a named ValueError."""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor

from quantkit_kernels.word_order import GROUP_SIZES

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_SCHEME = {
    "format": "pack-quantized",
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "actorder": None,
    "input_activations": None,
}


class Tensors:
    """The tensors of a checkpoint; a file is opened when it is first needed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stack, self._open = ExitStack(), dict[str, Any]()
        self.files = self._files()
        self.group_size = group_size_of(directory / "config.json")

    def __enter__(self) -> "Tensors":
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
        from safetensors import SafetensorError  # noqa: PLC0415 (only a checkpoint needs it)

        path = self.directory / self.files[name]
        try:
            tensor: Tensor = self._opened(path).get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{path} does not give {name}: {error}") from error
        return tensor

    def _opened(self, path: Path) -> Any:
        if path.name not in self._open:
            from safetensors import SafetensorError, safe_open  # noqa: PLC0415 (only a checkpoint needs it)

            try:
                self._open[path.name] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path} cannot be read: {error}") from error
        return self._open[path.name]

    def _files(self) -> dict[str, str]:
        index = self.directory / _INDEX
        if not index.is_file():
            if (self.directory / _SINGLE).is_file():
                return dict.fromkeys(self._opened(self.directory / _SINGLE).keys(), _SINGLE)
            raise ValueError(f"neither {index} nor {_SINGLE} is there: this is no converted checkpoint")
        files = _document(index).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise ValueError(f"{index} has no weight_map of names to files")
        for name, file in files.items():
            if PurePosixPath(file).name != file or file in ("", ".."):
                raise ValueError(f"{index} puts {name} into {file!r}, which is no file beside it")
        return files


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} is no JSON object")
    return document


def group_size_of(path: Path) -> int:
    """That of every weight. Raises ValueError for weights that mean anything else than the kernels compute."""
    section = _mapping(_document(path).get("quantization_config"))
    groups = {name: _mapping(group) for name, group in _mapping(section.get("config_groups")).items()}
    for group in groups.values():
        weights = _mapping(group.get("weights"))
        if (weights.get("type"), weights.get("num_bits")) == ("float", 8):
            raise ValueError(f"{path}: it has FP8 weights, which patch does not take: convert with --rest bf16")
    sizes: set[Any] = {_mapping(group.get("weights")).get("group_size") for group in groups.values()}
    if len(sizes) != 1 or sizes == {None}:
        raise ValueError(f"{path} names no single INT4 group size: {sorted(map(str, sizes))}")
    for name, group in groups.items():
        weights = _mapping(group.get("weights"))
        found = {"format": group.get("format") or section.get("format")}
        found |= {key: weights.get(key) for key in ("num_bits", "type", "symmetric", "strategy", "actorder")}
        found["input_activations"] = group.get("input_activations")
        for key, wanted in _SCHEME.items():
            if found[key] != wanted:
                raise ValueError(f"{path}: {name} has {key} {found[key]!r}, and the kernels are for {wanted!r}")
    size = sizes.pop()
    if size not in GROUP_SIZES:
        raise ValueError(f"{path} has group_size {size!r}, not one of 32, 64, 128")
    return int(size)


def _mapping(value: Any) -> dict[str, Any]:
    """An empty one for what is none."""
    return value if isinstance(value, dict) else {}
