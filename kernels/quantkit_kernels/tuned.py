"""Tiles that were measured on a GPU, by shape and number of tokens: read from a file, never made up here.

``tuned/NAME.json`` holds ``{"gpu": name, "triton": version, "dense": {"ROWSxCOLSxGROUP": {"TOKENS": tile}}, "moe":
{"EXPERTSxWIDTHxCOLSxGROUPxTOPK": {"TOKENS": tile}}}``, where a tile has the fields of ``GemmTile`` or ``MoeTile`` and
is meant for as many tokens or fewer, of repacked words. An unknown GPU, or shape, or another Triton has none: what
``tiles.py`` computes holds.
"""

import json
from collections.abc import ItemsView
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import triton

TUNED = Path(__file__).parent / "tuned"
KINDS = ("dense", "moe")
Table = dict[str, dict[str, dict[int, dict[str, Any]]]]  # kind, shape, tokens
Tile = TypeVar("Tile")


def file_of(gpu: str) -> Path:
    """Where the tiles of a GPU lie, by the name that torch has for it."""
    return TUNED / f"{''.join(letter if letter.isalnum() else '-' for letter in gpu.lower())}.json"


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


class Gpu(NamedTuple):
    """``name``: as torch has it."""

    name: str
    num_sms: int


NO_GPU = Gpu("", 132)  # the SMs of an H200


@cache
def gpu_of(device: torch.device) -> Gpu:
    """``NO_GPU`` on the CPU."""
    if device.type != "cuda":
        return NO_GPU
    properties = torch.cuda.get_device_properties(device)
    return Gpu(torch.cuda.get_device_name(device), properties.multi_processor_count)


@cache
def table_of(gpu: str) -> Table:
    """All tiles of a GPU. Raises ValueError for a file that is not what the module's docstring says."""
    path = file_of(gpu)
    if not gpu or not path.is_file():
        return {kind: {} for kind in KINDS}
    try:
        document = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON: {error}") from error
    if not isinstance(document, dict) or document.get("gpu") != gpu or set(document) != {"gpu", "triton", *KINDS}:
        raise ValueError(f"{path}: is no table of tiles for {gpu}")
    if _minor(str(document["triton"])) != _minor(triton.__version__):  # another compiler: another tile is the fastest
        return {kind: {} for kind in KINDS}
    return {kind: _shapes(document[kind], f"{path}: {kind}") for kind in KINDS}


def _shapes(value: object, place: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Tiles by shape and tokens, the fewest first."""
    found = {}
    for shape, of_shape in _entries(value, place):
        tiles = {}
        for tokens, tile in _entries(of_shape, f"{place} {shape}"):
            if not tokens.isdecimal():
                raise ValueError(f"{place} {shape}: {tokens!r} is no number of tokens")
            tiles[int(tokens)] = dict(_entries(tile, f"{place} {shape} {tokens}"))
        found[shape] = dict(sorted(tiles.items()))
    return found


def _entries(value: object, place: str) -> ItemsView[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place}: is a {type(value).__name__}, not an object")
    return value.items()


def tuned_tile(kind: str, shape: tuple[int, ...], *, num_tokens: int, gpu: str, make: type[Tile]) -> Tile | None:
    """The tile for the least number of tokens that is not below ``num_tokens``, where one was measured.

    Raises ValueError for a tile that no kernel could run with: ``make`` refuses it.
    """
    name = "x".join(map(str, shape))
    for tokens, tile in table_of(gpu)[kind].get(name, {}).items():
        if num_tokens <= tokens:
            place = f"{file_of(gpu)}: {kind} {name} {tokens}"
            if set(tile) != {field.name for field in fields(make)}:  # type: ignore[arg-type]
                raise ValueError(f"{place}: a tile of {kind} has the fields {sorted(tile)}")
            try:
                return make(**tile)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
    return None
