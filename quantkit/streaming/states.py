"""Hidden states of all sequences between two layers, in memory or in files.

Legend: N sequences, S tokens of each, T = N * S tokens in order, H hidden size, K indices that are handed on.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoint.disk import free_bytes, named_errors
from quantkit.errors import ResourceError, SourceError
from quantkit.hidden_states import state_bytes
from quantkit.machine import bytes_text

_CARRY = "carry-{}"
_STATES = "states-{}"


@dataclass(slots=True, kw_only=True)
class States:
    """Where all sequences are: ``layer`` of them have run.

    ``directory``: where files are mapped instead of memory. States before and after a layer, and what is handed on, are
    two files that take turns, so that a layer which was interrupted can be run again.
    """

    num_sequences: int
    length: int
    width: int
    dtype: torch.dtype
    directory: Path | None
    layer: int = 0
    _stores: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.length

    @property
    def hidden(self) -> Tensor:
        """Input of the next layer. Raises SourceError where an earlier run's is not there any more."""
        name = _STATES.format(self.layer % 2)
        if self.layer and self.directory is not None and name not in self._stores:
            self._check_there(self.directory / f"{name}.bin")
        return self.store(name, width=self.width, dtype=self.dtype)

    def _check_there(self, path: Path) -> None:
        """Unless it is whole: a new one would hold zeros."""
        needed = self.num_tokens * self.width * self.dtype.itemsize
        if not path.is_file() or path.stat().st_size != needed:
            raise SourceError(
                f"is not there with the {needed:,} bytes that {self.layer} layers have left",
                file=path,
                remedy="give --no-resume to begin anew",
            )

    @property
    def after(self) -> Tensor:
        """Room for its output."""
        return self.store(_STATES.format((self.layer + 1) % 2), width=self.width, dtype=self.dtype)

    @property
    def carry(self) -> Tensor | None:
        """Indices that some layers take from the one before."""
        return self._stores.get(_CARRY.format(self.layer % 2))

    def hand_on(self, first: int, last: int, indices: Tensor) -> None:
        """Keep int32 indices [N, S, K] of sequences ``[first, last)`` for the next layer."""
        carry_TK = self.store(_CARRY.format((self.layer + 1) % 2), width=indices.shape[-1], dtype=indices.dtype)
        self.rows(carry_TK, first, last)[:] = indices

    def store(self, name: str, *, width: int, dtype: torch.dtype) -> Tensor:
        """[T, width], the same memory whenever it is asked for: what it holds is left from before."""
        found = self._stores.get(name)
        if found is None or found.shape[1] != width or found.dtype != dtype:
            found = _allocate(self.directory, name, (self.num_tokens, width), dtype)
            self._stores[name] = found
        return found

    def keep(self) -> None:
        """Count one layer more, its output on the disk where the states are in files."""
        if self.directory is not None:
            for path in state_files(self.directory, self.layer + 1):
                if path.stem in self._stores:
                    _flush(path)
        self.layer += 1

    def batches(self, tokens: int) -> list[tuple[int, int]]:
        """Ranges of whole sequences, of at most so many tokens or of one sequence."""
        step = max(1, tokens // self.length)
        return [(first, min(first + step, self.num_sequences)) for first in range(0, self.num_sequences, step)]

    def rows(self, store_TX: Tensor, first: int, last: int) -> Tensor:
        """View [N, S, X] of a store at sequences ``[first, last)``."""
        return store_TX[first * self.length : last * self.length].view(last - first, self.length, -1)


def state_files(directory: Path, layer: int) -> tuple[Path, Path]:
    """Of the states behind ``layer`` layers, and of the indices that the last of them hands on, if it does."""
    return directory / f"{_STATES.format(layer % 2)}.bin", directory / f"{_CARRY.format(layer % 2)}.bin"


def open_states(
    num_sequences: int,
    length: int,
    width: int,
    *,
    dtype: torch.dtype,
    directory: Path | None = None,
    layer: int = 0,
) -> States:
    """States of so many tokens, what is in the files of ``directory`` where ``layer`` layers have run already.

    Raises ResourceError where the disk has no room.
    """
    states = States(
        num_sequences=num_sequences, length=length, width=width, dtype=dtype, directory=directory, layer=layer
    )
    if directory is None:
        return states
    if layer:
        _, carry = state_files(directory, layer)
        if carry.exists():
            columns = carry.stat().st_size // (states.num_tokens * torch.int32.itemsize)
            states.store(carry.stem, width=columns, dtype=torch.int32)
        return states
    for path in directory.glob("*.bin"):
        path.unlink()
    needed = state_bytes(states.num_tokens, width, value_bytes=dtype.itemsize)
    if needed > free_bytes(directory):
        raise ResourceError(
            f"hidden states of {states.num_tokens:,} tokens need {bytes_text(needed)}, "
            f"{bytes_text(free_bytes(directory))} are free",
            file=directory,
            remedy="run fewer tokens, or choose another disk",
        )
    return states


def _allocate(directory: Path | None, name: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """In a file whose room is taken at once: a full disk under a map would kill the process."""
    if directory is None:
        return torch.empty(shape, dtype=dtype)
    path = directory / f"{name}.bin"
    num_bytes = shape[0] * shape[1] * dtype.itemsize
    with named_errors(path):
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, max(num_bytes, 1))
            os.ftruncate(descriptor, num_bytes)
        finally:
            os.close(descriptor)
    return torch.from_file(str(path), shared=True, size=shape[0] * shape[1], dtype=dtype).view(shape)


def _flush(path: Path) -> None:
    with named_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
