"""Memory that GPTQ takes layer by layer, at most: weights, and the matrices of the modules in work. Without torch.

Not counted: activations, of some 2,048 tokens at a time, and hidden states, which lie in files.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

from quantkit.calibrated.modules import Shapes, layer_number
from quantkit.hidden_states import FLOAT32_BYTES
from quantkit.module_names import expert_of
from quantkit.weights.weight import Weight

_FLOAT64_BYTES = 8
_ALIVE = 2
"""Layers, and experts: one in use while the next one is read."""
_MATRICES = 8
"""Of an expert's input: its mean and its layer's, both together, in order, damped; the factor half made, and whole."""
_KEPT_MATRICES = 3
"""Of gate and up while down is worked on: their layer's mean, and their factor."""
_FACTOR_MATRICES = 6
"""Of one Linear, beside the means of all those in its layer."""
_COPIES = 6
"""Of a weight while it is rounded."""


def streaming_bytes(weights: Iterable[Weight], shapes: Shapes) -> int:
    """Of ``weights`` those in layers count; ``shapes``: of what becomes INT4."""
    return weights_bytes(weights) + matrices_bytes(shapes)


def weights_bytes(weights: Iterable[Weight]) -> int:
    """Two layers without their experts and two experts, the largest, in float32."""
    layers: Counter[int] = Counter()
    experts: Counter[tuple[str, int]] = Counter()
    for weight in weights:
        number, expert = layer_number(weight.name), expert_of(weight.name)
        if expert is not None and expert.number is not None:
            experts[expert.experts, expert.number] += weight.num_elements
        elif number is not None:
            layers[number] += weight.num_elements
    return _ALIVE * FLOAT32_BYTES * (max(layers.values(), default=0) + max(experts.values(), default=0))


def matrices_bytes(shapes: Shapes) -> int:
    """In float64, of what is square in the width of an input, and of a weight."""
    experts = {num_cols for name, (_, num_cols) in shapes.items() if expert_of(name)}
    linears: dict[int | None, list[int]] = defaultdict(list)
    for name, (_, num_cols) in shapes.items():
        if not expert_of(name):
            linears[layer_number(name)].append(num_cols)
    needed = [sum(cols * cols for cols in of) + _FACTOR_MATRICES * max(of) ** 2 for of in linears.values()]
    if experts:
        needed.append(_MATRICES * max(experts) ** 2 + _KEPT_MATRICES * min(experts) ** 2)
    copies = _COPIES * max((num_rows * num_cols for num_rows, num_cols in shapes.values()), default=0)
    return _FLOAT64_BYTES * (max(needed, default=0) + copies)
