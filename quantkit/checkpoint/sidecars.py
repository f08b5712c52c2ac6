"""The files beside the weights: everything is copied, except weights, indexes and caches, and what is skipped is said.

A list of names to copy would miss the next release's new file. Code is copied, never run.
"""

from dataclasses import dataclass
from pathlib import Path

_WEIGHTS = (
    *(
        ".safetensors",
        ".bin",
        ".pt",
        ".pth",
        ".ckpt",
        ".gguf",
        ".ggml",
        ".onnx",
        ".onnx_data",
        ".h5",
        ".msgpack",
    ),
    *(".npz", ".npy", ".pkl", ".pickle", ".tflite", ".pb", ".nemo", ".distcp"),
)
_REWRITTEN = {
    "config.json": "written anew",
    "conversion.json": "belongs to the source",
    "hf_quant_config.json": "declares the source's quantization",
}
README_NAME = "README.md"
SOURCE_README_NAME = "SOURCE_README.md"  # the source's card must not pass for the card of the output


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """A file to copy: ``name`` relative to the output, with forward slashes."""

    name: str
    path: Path
    file_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecars:
    """What is copied, and what is not with the reason."""

    copied: tuple[Sidecar, ...]
    skipped: tuple[tuple[str, str], ...]


def find_sidecars(directory: Path) -> Sidecars:
    """Walk the directory. A link is followed only into the directory itself or to where config.json really lies."""
    root = directory.resolve()
    allowed = {root, (directory / "config.json").resolve().parent}
    copied: list[Sidecar] = []
    skipped: list[tuple[str, str]] = []
    for path, name, reason in _walk(directory, directory):
        reason = reason or _skip_reason(path, name, allowed)  # noqa: PLW2901
        if reason:
            skipped.append((name, reason))
        else:
            target = SOURCE_README_NAME if name == README_NAME else name
            copied.append(Sidecar(name=target, path=path, file_bytes=path.stat().st_size))
    copied.sort(key=lambda sidecar: sidecar.name)
    return Sidecars(copied=tuple(copied), skipped=tuple(sorted(skipped)))


def _walk(directory: Path, root: Path) -> list[tuple[Path, str, str]]:
    found: list[tuple[Path, str, str]] = []
    for path in sorted(directory.iterdir()):
        name = path.relative_to(root).as_posix()
        if path.name.startswith("."):
            found.append((path, name, "hidden"))
        elif path.is_dir():
            if path.is_symlink():
                found.append((path, name, "a link to a directory"))
            elif path.name == "__pycache__":
                found.append((path, name, "a cache"))
            else:
                found.extend(_walk(path, root))
        elif not (directory == root and path.name.endswith(".safetensors")):
            found.append((path, name, ""))
    return found


def _skip_reason(path: Path, name: str, allowed: set[Path]) -> str:
    if name in _REWRITTEN:
        return _REWRITTEN[name]
    if name.endswith(".index.json"):
        return "an index"
    if path.name.lower().endswith(_WEIGHTS):
        return "weights"
    if name == SOURCE_README_NAME:
        return "would hide the source's README"
    return _link_problem(path, allowed)


def _link_problem(path: Path, allowed: set[Path]) -> str:
    if not path.is_file():
        return "not a regular file"
    target = path.resolve()
    return "" if any(target.is_relative_to(place) for place in allowed) else "a link that leaves the checkpoint"
