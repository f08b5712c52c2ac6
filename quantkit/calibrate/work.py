"""The directory beside a statistics file in which an interrupted run is found again."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.begun import begin_directory
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
    begin_directory(directory / _ABOUT, about, resume=resume)
    return Work(directory=directory)
