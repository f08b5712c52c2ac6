"""Where a model runs and in what it is computed, by their names on the command line; and where its memory ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from quantkit.errors import ResourceError, UsageError, first_line

# what torch says of memory where it has no class for that: of the machine's, and of what its libraries want of a GPU's
_WORDS = ("DefaultCPUAllocator: can't allocate memory", "ALLOC_FAILED")
FEWER_TOKENS = "give fewer tokens, or another --device"


def torch_dtype(name: str) -> torch.dtype:
    """Of a name that the command line has checked."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), name
    return found


def torch_device(name: str) -> torch.device:
    """Raises UsageError for a device that is not here."""
    try:
        found = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device {name} is no device", remedy="write cpu or cuda:0") from error
    num_gpus = torch.cuda.device_count()
    if found.type not in ("cpu", "cuda") or (found.type == "cuda" and (found.index or 0) >= num_gpus):
        raise UsageError(f"--device {name}: torch sees {num_gpus or 'no'} GPUs", remedy="leave --device out")
    return found


def is_out_of_memory(error: Exception) -> bool:
    """Of a GPU, or of the machine."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


@contextmanager
def named_memory_errors(where: str | Path, *, remedy: str = FEWER_TOKENS) -> Iterator[None]:
    """Turns what is raised where memory ends into a ResourceError.

    ``where``: the layer, expert or weight in work; the directory where a whole model is.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        tensor, file = (None, where) if isinstance(where, Path) else (where, None)
        message = f"no memory is left ({first_line(error)})"
        raise ResourceError(message, tensor=tensor, file=file, remedy=remedy) from error
