"""Static scales of the activations of `w4afp8` experts, from the largest inputs that calibration saw.

SGLang divides the input of all experts of a layer by one number for gate and up and by one for down: the largest
``input_scale`` among them, 1 where an expert has none. So all experts of a layer are given the same two.
"""

from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np

from quantkit.checkpoint.given_file import as_given, read_given_header
from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.reader import read_tensor
from quantkit.errors import RecipeError, SourceError
from quantkit.module_names import Expert, expert_of, experts_in
from quantkit.numerics import bfloat16
from quantkit.numerics.fp8 import E4M3_MAX
from quantkit.statistics.names import ABSMAX, DOWN, GATE_UP
from quantkit.tensors import F32
from quantkit.weights.weight import Weight

REMEDY = "see --stats in the README"
_PROJECTIONS = ("gate_proj", "up_proj", DOWN)
_STACKED = (GATE_UP, DOWN)  # all experts of a layer
_LEAST, _MOST = 1e-6, 1e6  # of inputs that a model can have


def read_input_scales(path: Path, layers: Collection[str], num_experts: int) -> dict[str, tuple[float, float]]:
    """Layer's experts (``model.layers.3.mlp.experts``) to the scales of gate and up, and of down; BF16 values.

    ``layers``: what is known of these, with so many experts each; statistics of others are of another model.

    ``path``: safetensors with ``MODULE.input_absmax`` F32 of any shape, the largest absolute inputs of a module; or
    this tool's statistics, where a tensor [experts, channels] stands for all experts of a layer. Raises SourceError
    where it holds none, or what cannot be meant.
    """
    largest: dict[str, list[float]] = {}
    for tensor in read_given_header(path, remedy=REMEDY).tensors:
        module = tensor.name.removesuffix(ABSMAX)
        if module == tensor.name or experts_in(module) is None:
            continue
        expert = _expert(module, tensor, num_experts)
        if expert is None or expert.experts not in layers:
            raise SourceError(
                "is no expert's projection of this checkpoint",
                tensor=tensor.name,
                file=path,
                remedy="give statistics of this checkpoint",
            )
        ends = largest.setdefault(expert.experts, [0.0, 0.0])
        is_down = int(expert.rest == DOWN)
        ends[is_down] = max(ends[is_down], _largest(tensor, path))
    if not largest:
        raise SourceError(f"holds no MODULE{ABSMAX} of experts", file=path, remedy=REMEDY)
    for parent, ends in largest.items():
        if not all(ends):
            raise SourceError(
                "there is no input of its experts above 0",
                tensor=parent,
                file=path,
                remedy="give those of gate or up and of down",
            )
    return {parent: (_scale(ends[0]), _scale(ends[1])) for parent, ends in sorted(largest.items())}


def _expert(module: str, tensor: StoredTensor, num_experts: int) -> Expert | None:
    """An expert's projection, or that of all experts; None for experts that there are not."""
    expert, shape = expert_of(module), tensor.spec.shape
    if expert is None:
        return None
    if expert.number is None:
        return expert if expert.rest in _STACKED and len(shape) == 2 and shape[0] <= num_experts else None
    return expert if expert.rest in _PROJECTIONS and expert.number < num_experts else None


def _largest(tensor: StoredTensor, path: Path) -> float:
    """Zero of an expert that saw nothing. Raises SourceError for what no input is."""
    problem, top = "", 0.0
    if tensor.spec.dtype != F32:
        problem = "is not F32"
    else:
        with as_given(path, remedy=REMEDY):
            values = read_tensor(tensor).view(np.float32)
        top = float(values.max(initial=0))
        if not np.isfinite(values).all() or (values < 0).any():
            problem = "holds NaN, Inf or less than 0"
        elif top and not _LEAST <= top <= _MOST:
            problem = f"holds {top:g}, which no input is"
    if problem:
        raise SourceError(problem, tensor=tensor.name, file=path, remedy="write positive FP32 numbers")
    return top


def _scale(absmax: float) -> float:
    """The smallest BF16 at which the largest input is no more than FP8 holds: the loader keeps scales in BF16."""
    wanted = absmax / E4M3_MAX
    bits = bfloat16.from_float64(np.array([wanted]))
    if float(bfloat16.to_float32(bits)[0]) < wanted:
        bits = bits + np.uint16(1)
    return float(bfloat16.to_float32(bits)[0])


def input_scale_of(weight: Weight, scales: Mapping[str, tuple[float, float]]) -> int | None:
    """Bits of an expert's scale; None where there are none at all. Raises RecipeError for a layer without."""
    if not scales:
        return None
    expert = expert_of(weight.module)
    if expert is None or expert.experts not in scales:
        raise RecipeError(
            "the statistics hold nothing of this layer, and the engine would take 1 for it",
            tensor=weight.name,
            file=weight.stored.path.name,
            remedy="give statistics of this checkpoint, or leave --stats out",
        )
    return _bits(scales[expert.experts][int(expert.rest == DOWN)])


@lru_cache(maxsize=4096)
def _bits(value: float) -> int:
    """Once for a layer, and not for each of its experts."""
    return int(bfloat16.from_float64(np.array([value]))[0])
