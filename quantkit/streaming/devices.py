"""Where a model runs and in what it is computed, by their names on the command line."""

import torch

from quantkit.errors import UsageError


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
