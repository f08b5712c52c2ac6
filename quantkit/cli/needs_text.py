"""What a method that sees inputs will need, as a plan's JSON document tells it: rows for terminal and Markdown."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quantkit.cli import render
from quantkit.machine import bytes_text

Document = Mapping[str, Any]
_SOME_TOKENS = 1000
_NONE = "-"


def needs_title(calibration: Document) -> str:
    """By which method."""
    return f"Needs of --method {calibration['method']}"


def needs_columns(calibration: Document) -> Sequence[str]:
    """The ways that there are to do it."""
    return ["what", *("--streaming" if way["streaming"] else "llm-compressor" for way in calibration["ways"])]


def needs_rows(calibration: Document) -> Sequence[Sequence[str]]:
    """What is needed in each way, of what any of them needs."""
    ways = [dict(_needs(way)) for way in calibration["ways"]]
    rows = [[what, *(way[what] for way in ways)] for what in ways[0]]
    return [row for row in rows if set(row[1:]) != {_NONE}]


def _needs(way: Document) -> Iterator[tuple[str, str]]:
    wanted, memory = way["wanted_tokens"], bytes_text(way["memory_bytes"])
    yield "tokens that it wants", _NONE if wanted is None else render.count(wanted)
    yield "words, beside the output until it is there", bytes_text(way["words_bytes"])
    yield f"hidden states of {_SOME_TOKENS:,} tokens", _some(_SOME_TOKENS * way["token_bytes"])
    yield "source decoded to BF16", _some(way["decoded_bytes"])
    yield "disk for so many tokens, output included", bytes_text(way["disk_bytes"])
    yield "memory for two layers, two experts and Hessians", memory if way["streaming"] else _NONE
    yield "memory for the whole model, else it is on disk", _NONE if way["streaming"] else memory


def _some(num_bytes: int) -> str:
    return bytes_text(num_bytes) if num_bytes else _NONE
