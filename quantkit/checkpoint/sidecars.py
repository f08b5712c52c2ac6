"""The files beside the weights: everything is copied, except weights, indexes and caches, and what is skipped is said.

A list of names to copy would miss the next release's new file. Code is copied, never run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from quantkit.checkpoint.file_names import (
    CONFIG_NAME,
    HF_QUANT_CONFIG_NAME,
    MANIFEST_NAME,
    README_NAME,
    SOURCE_README_NAME,
)
from quantkit.checkpoint.links import Boundary
from quantkit.errors import SourceError

WEIGHT_SUFFIXES = (
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
    CONFIG_NAME: "written anew",
    MANIFEST_NAME: "belongs to the source",
    HF_QUANT_CONFIG_NAME: "declares the source's quantization",
}
EXPECTED_SKIPS = ("written anew", "an index")  # the reasons that no user need be told of


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


@dataclass(slots=True)
class _Sorting:
    """Files on their way into ``Sidecars``, wherever they were found."""

    copied: list[Sidecar] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def copy(self, name: str, path: Path, file_bytes: int) -> None:
        target = SOURCE_README_NAME if name == README_NAME else name
        self.copied.append(Sidecar(name=target, path=path, file_bytes=file_bytes))

    def skip(self, name: str, reason: str) -> None:
        self.skipped[name if _is_utf8(name) else ascii(name)] = reason

    def sidecars(self) -> Sidecars:
        copied = sorted(self.copied, key=lambda sidecar: sidecar.name)
        return Sidecars(copied=tuple(copied), skipped=tuple(sorted(self.skipped.items())))


def find_sidecars(directory: Path, boundary: Boundary) -> Sidecars:
    """Walk the directory. Raises SourceError where a folder cannot be listed."""
    sorting = _Sorting()
    for path, name, place_reason in _walk(directory, directory):
        if reason := place_reason or _skip_reason(path, name, boundary):
            sorting.skip(name, reason)
        else:
            sorting.copy(name, path, path.stat().st_size)
    return sorting.sidecars()


def choose_sidecars(files: Mapping[str, int | None], directory: Path) -> Sidecars:
    """The same of a listing: names with forward slashes, and lengths; what is copied will lie in ``directory``."""
    sorting = _Sorting()
    for name, num_bytes in files.items():
        parts = PurePosixPath(name).parts
        place = next((index for index, part in enumerate(parts) if part.startswith(".") or part == "__pycache__"), None)
        if place is not None:
            is_cache = parts[place] == "__pycache__" and place < len(parts) - 1
            if is_cache or parts[place].startswith("."):
                sorting.skip("/".join(parts[: place + 1]), "a cache" if is_cache else "hidden")
                continue
        if len(parts) == 1 and name.endswith(".safetensors"):
            continue
        if name != "/".join(parts) or name.startswith("/") or "\\" in name or "\0" in name:
            sorting.skip(ascii(name), "its name leaves the checkpoint")
        elif reason := _name_reason(parts[-1], name):
            sorting.skip(name, reason)
        else:
            sorting.copy(name, directory / name, num_bytes or 0)
    return sorting.sidecars()


def _walk(directory: Path, root: Path) -> list[tuple[Path, str, str]]:
    found: list[tuple[Path, str, str]] = []
    try:
        paths = sorted(directory.iterdir())
    except OSError as error:
        raise SourceError(
            f"cannot be listed ({error.strerror})", file=directory, remedy="check its permissions, or move it away"
        ) from error
    for path in paths:
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


def _skip_reason(path: Path, name: str, boundary: Boundary) -> str:
    return _name_reason(path.name, name) or _link_problem(path, boundary)


def _name_reason(file_name: str, name: str) -> str:
    if name in _REWRITTEN:
        return _REWRITTEN[name]
    if name.endswith(".index.json"):
        return "an index"
    if file_name.lower().endswith(WEIGHT_SUFFIXES):
        return "weights"
    if name == SOURCE_README_NAME or name.split("/", maxsplit=1)[0] in {
        README_NAME,
        SOURCE_README_NAME,
        *_REWRITTEN,
    } - {name}:
        return "would stand in the place of a file that is written"
    return "" if _is_utf8(name) else "its name is not UTF-8"


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _link_problem(path: Path, boundary: Boundary) -> str:
    if not path.is_file():
        return "not a regular file"
    return "" if boundary.holds(path) else "a link that leaves the checkpoint"
