"""Typed look-up in a `config.json`: a key that is missing or of the wrong type is the source's fault."""

from collections.abc import Mapping
from typing import Any

from quantkit.checkpoint.file_names import CONFIG_NAME
from quantkit.errors import SourceError

Config = Mapping[str, Any]
LARGEST = 10_000_000
MOST_LAYERS, MOST_EXPERTS = 1_000, 4_000
MOST_LAYERS_TIMES_EXPERTS = 400_000
_LARGEST_OF = {"layers": MOST_LAYERS, "experts": MOST_EXPERTS}  # by a key's last word: what is enumerated


def text_config(config: Config) -> Config:
    """The part that describes the language model: multimodal configs nest it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def integer(config: Config, key: str, default: int | None = None, *, at_least: int = 0) -> int:
    """``default`` stands in for a key that is absent or null; what is divided by is ``at_least`` 1.

    Counts that no model has are refused: a hostile config would be enumerated without end.
    """
    largest = _LARGEST_OF.get(key.rpartition("_")[2], LARGEST)
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= largest:
        what = "is missing" if value is None else f"is {value!r}, not a count from {at_least} to {largest}"
        raise SourceError(f"{key} {what}", file=CONFIG_NAME, remedy="take config.json from the source again")
    return value


def section(config: Config, key: str) -> Config | None:
    """A nested object, or None where the key is absent or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise SourceError(f"{key} is no object", file=CONFIG_NAME, remedy="take config.json from the source again")
    return value


def pair(config: Config, key: str, default: tuple[int, int]) -> tuple[int, int]:
    """Two positive integers; ``default`` stands in for a key that is absent or null."""
    value = config.get(key)
    if value is None:
        return default
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(one) is int and 0 < one < LARGEST for one in value)
    ):
        raise SourceError(
            f"{key} is {value!r}, not two positive integers",
            file=CONFIG_NAME,
            remedy="take config.json from the source again",
        )
    return value[0], value[1]


def flag(config: Config, key: str, default: bool) -> bool:
    """``default`` stands in for a key that is absent or null."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise SourceError(
            f"{key} is {value!r}, not true or false",
            file=CONFIG_NAME,
            remedy="take config.json from the source again",
        )
    return value


def per_layer(config: Config, key: str, num_layers: int) -> list[Any] | str | None:
    """A list or string with one entry a layer, or None where the key is absent, null or empty."""
    value = config.get(key)
    if not value:
        return None
    if not isinstance(value, list | str) or len(value) < num_layers:
        raise SourceError(
            f"{key} does not have an entry for each of {num_layers} layers",
            file=CONFIG_NAME,
            remedy="take config.json from the source again",
        )
    return value
