"""What the name of a module or tensor says by itself: the layer that it lies in, and the expert.

No more than text, so it stands beside `patterns`: layouts, which know no architecture, read these names as well as
families and all that is above them. A part of a name counts whole (``shared_experts`` are no ``experts``), a number is
written in the digits 0 to 9, and what begins with ``layers.N`` or ``experts.`` lies in them as well.
"""

import re
from functools import lru_cache
from typing import NamedTuple

_LAYER = re.compile(r"((?:.*?\.)?)layers\.([0-9]+)(?:\.(.*))?", re.DOTALL)  # the first one
_EXPERT = re.compile(r"((?:.*\.)?experts)\.(?:([0-9]+)(?:\.|\Z))?(.*)", re.DOTALL)  # the last one
_MOST_DIGITS = 9


class Layer(NamedTuple):
    """Of ``model.layers.3.mlp.gate.weight``: ``model.``, 3 and ``mlp.gate.weight``.

    ``root`` tells the text model's layers from those of a vision part beside it.
    """

    root: str
    number: int
    rest: str


class Expert(NamedTuple):
    """Of ``model.layers.3.mlp.experts.5.up_proj``: ``model.layers.3.mlp.experts``, 5 and ``up_proj``.

    ``number`` is None of what a layer's experts have in common, as ``....experts.gate_up_proj``.
    """

    experts: str
    number: int | None
    rest: str


def layer_of(name: str) -> Layer | None:
    """Where a name lies, None outside the layers; without digits behind ``layers.`` it is no layer."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return None
    root, digits, rest = found.groups()
    return Layer(root, _number(digits), rest or "")


def layer_name(root: str, number: int) -> str:
    """``model.layers.3`` of ``model.`` and 3."""
    return f"{root}layers.{number}"


def expert_of(name: str) -> Expert | None:
    """Which expert a name is part of, or that it is of all; None beside the routed experts."""
    found = _EXPERT.fullmatch(name)
    if found is None:
        return None
    experts, digits, rest = found.groups()
    return Expert(experts, None if digits is None else _number(digits), rest)


def experts_in(name: str) -> str | None:
    """The same experts without their number, for very many names: it takes a third of the time."""
    parent, found, _ = f".{name}".rpartition(".experts.")
    return f"{parent}.experts"[1:] if found else None


@lru_cache(maxsize=4096)
def _number(digits: str) -> int:
    """Of a layer or an expert; what has more digits than any count is beyond them all."""
    return int(digits[-_MOST_DIGITS:]) if len(digits.lstrip("0")) <= _MOST_DIGITS else 10**_MOST_DIGITS
