"""The directory beside a statistics file in which an interrupted run is found again."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.disk import is_own_directory, named_errors, write_file
from quantkit.errors import SourceError, UsageError
from quantkit.statistics.file import Array, Statistics, open_statistics, write_statistics

_ABOUT = "about.json"
_LAYER = "layer-{:05}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """``directory`` holds the statistics of each layer that is done, and the states behind the last of them."""

    directory: Path

    def layers_done(self) -> int:
        """Layers without a gap from the first on."""
        number = 0
        while (self.directory / _LAYER.format(number)).is_file():
            number += 1
        return number

    def keep(self, layer: int, arrays: dict[str, Array], model: str) -> None:
        """What was found in a layer, whole or not at all."""
        write_statistics(self.directory / _LAYER.format(layer), arrays, model=model, about={})

    def parts(self) -> list[Statistics]:
        """Of all layers that are done, in their order."""
        return [open_statistics(self.directory / _LAYER.format(layer)) for layer in range(self.layers_done())]

    def remove(self) -> None:
        """All of it."""
        shutil.rmtree(self.directory)


def open_work(output: Path, about: dict[str, Any], *, resume: bool) -> Work:
    """The directory of ``OUTPUT.partial``. Raises UsageError where it belongs to something else, naming that."""
    directory = output.with_name(f"{output.name}.partial")
    path = directory / _ABOUT
    draft = path.with_name(f"{_ABOUT}.draft")
    if directory.is_symlink() or (directory.exists() and not _is_ours(directory)):
        raise UsageError("is there and not ours", file=directory, remedy="remove it, or choose another -o")
    with named_errors(directory):
        if directory.exists() and not resume:
            shutil.rmtree(directory)
        if not path.is_file():
            directory.mkdir(parents=True, exist_ok=True)
            draft.unlink(missing_ok=True)
            write_file(draft, (json.dumps(about, indent=1, sort_keys=True) + "\n").encode())
            draft.rename(path)
    _check_same(path, about)
    return Work(directory=directory)


def _is_ours(directory: Path) -> bool:
    """Also one that was made and not begun: a run may be killed before it says what it is."""
    if not is_own_directory(directory):
        return False
    names = {path.name for path in directory.iterdir()}
    return _ABOUT in names or names <= {f"{_ABOUT}.draft"}


def _check_same(path: Path, about: dict[str, Any]) -> None:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise SourceError(f"is not JSON ({error})", file=path, remedy="run with --no-resume") from error
    if not isinstance(found, dict):
        raise SourceError("is no JSON object", file=path, remedy="run with --no-resume")
    different = sorted(key for key in about | found if about.get(key) != found.get(key))
    if different:
        key = different[0]
        raise UsageError(
            f"an earlier run was of another {key} ({found.get(key)}, not {about.get(key)})",
            file=path.parent,
            remedy="run that one to its end, or throw it away with --no-resume",
        )
