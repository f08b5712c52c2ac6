"""The directory beside a statistics file in which an interrupted run is found again."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantkit.checkpoint.begun import remove_run
from quantkit.checkpoint.disk import named_errors
from quantkit.errors import SourceError
from quantkit.statistics.file import Array, Statistics, open_statistics, write_statistics
from quantkit.statistics.fingerprint import Fingerprint
from quantkit.streaming.layer_journal import layer_file, layers_done


def work_of(output: Path) -> Path:
    """Where the work for a statistics file lies until that is there."""
    return output.with_name(f"{output.name}.partial")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """``directory`` holds the statistics of each layer that is done, and the states behind the last of them."""

    directory: Path

    def layers_done(self) -> int:
        """Without a gap from the first on."""
        return layers_done(self.directory)

    def keep(self, layer: int, arrays: dict[str, Array], model: Fingerprint) -> None:
        """What was found in a layer, whole or not at all. Raises SourceError for a number beyond FP32."""
        for name, array in arrays.items():
            if not np.isfinite(array).all():
                raise SourceError(
                    "is not finite: what this module is fed is too large for FP32",
                    tensor=name,
                    remedy="the weights before it are damaged; look at them in the source",
                )
        write_statistics(layer_file(self.directory, layer), arrays, model=model, about={})

    def parts(self) -> list[Statistics]:
        """Of all layers that are done, in their order."""
        return [open_statistics(layer_file(self.directory, layer)) for layer in range(self.layers_done())]

    def remove(self) -> None:
        """All of it."""
        with named_errors(self.directory):
            remove_run(self.directory)
