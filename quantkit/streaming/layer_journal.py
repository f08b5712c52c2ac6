"""What a run over layers has finished, with its hashes: who goes on believes no file that is not what it was.

An entry for each layer, from the first on: sha256 of its file, of the states behind it, and of what it hands on.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from quantkit.checkpoint.disk import is_own_directory, named_errors, remove, write_whole
from quantkit.checkpoint.json_files import MOST_INDEX_BYTES, read_json
from quantkit.checkpoint.reader import hash_file
from quantkit.errors import SourceError
from quantkit.streaming.states import state_files

_NAME = "layers.json"
_LAYER_FILE = "layer-{:05}.safetensors"
_STATES = "states"

Entry = Mapping[str, str]  # file name to sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Sound:
    """``layers``: how many of them need not be run again; ``damaged``: the file by which they are fewer."""

    layers: int
    damaged: Path | None = None


def layer_file(directory: Path, layer: int) -> Path:
    """Of a layer by its number: whole, or not there."""
    return directory / _LAYER_FILE.format(layer)


def states_directory(directory: Path) -> Path:
    """For the states between two layers."""
    return directory / _STATES


def layers_done(directory: Path) -> int:
    """Layers that are finished, as the journal says."""
    return len(_read(directory))


def add_layer(directory: Path, layer: int) -> None:
    """A layer is finished: its file and the states behind it are on the disk. Durable before the caller goes on."""
    files = (layer_file(directory, layer), *state_files(states_directory(directory), layer + 1))
    entry = {path.name: hash_file(path) for path in files if path.exists()}
    _write(directory, [*_read(directory)[:layer], entry])


def sound_layers(directory: Path, num_layers: int) -> Sound:
    """How far an earlier run's work can be believed: files hash as they did, and the states behind the last are there.

    What does not count is removed, so that it is made anew.
    """
    entries = _read(directory)
    sound = _sound(directory, entries, num_layers)
    with named_errors(directory):
        _clear(directory, sound.layers, num_layers)
    if sound.layers < len(entries):
        _write(directory, entries[: sound.layers])
    return sound


def _sound(directory: Path, entries: list[Entry], num_layers: int) -> Sound:
    hash_of = cache(_hash)
    journal = directory / _NAME
    if not entries and (journal.exists() or layer_file(directory, 1).exists()):
        return Sound(layers=0, damaged=journal)
    layers, damaged = 0, None
    for number, entry in enumerate(entries):
        if damaged := _damaged((layer_file(directory, number),), entry, hash_of):
            break
        layers = number + 1
    if layers == num_layers:
        return Sound(layers=layers)
    while layers:
        found = _damaged(state_files(states_directory(directory), layers), entries[layers - 1], hash_of)
        if found is None:
            break
        damaged, layers = damaged or found, layers - 1
    return Sound(layers=layers, damaged=damaged)


def _damaged(files: tuple[Path, ...], entry: Entry, hash_of: Callable[[Path], str | None]) -> Path | None:
    """The first that is not what it was."""
    return next((path for path in files if hash_of(path) != entry.get(path.name)), None)


def _hash(path: Path) -> str | None:
    """None of what is not there, or is no file of its own; one that cannot be read is another than it was."""
    if path.is_symlink() or not path.is_file() or not is_own_directory(path.parent):
        return None
    try:
        return hash_file(path)
    except SourceError:
        return ""


def _clear(directory: Path, layers: int, num_layers: int) -> None:
    for number in range(layers, num_layers):
        path = layer_file(directory, number)
        if path.exists() or path.is_symlink():
            remove(path)
    states = states_directory(directory)
    if (states.exists() or states.is_symlink()) and not is_own_directory(states):
        remove(states)
    states.mkdir(exist_ok=True)
    kept = state_files(states, layers) if 0 < layers < num_layers else ()
    for path in states.iterdir():
        if path not in kept:
            remove(path)


def _read(directory: Path) -> list[Entry]:
    """What is no journal holds no entry."""
    path = directory / _NAME
    if path.is_symlink() or not path.is_file():
        return []
    try:
        entries = read_json(path, what="a run over layers has it", most_bytes=MOST_INDEX_BYTES).get("layers")
    except SourceError:
        return []
    if not isinstance(entries, list) or not all(_is_entry(directory, *one) for one in enumerate(entries)):
        return []
    return entries


def _is_entry(directory: Path, layer: int, entry: Any) -> bool:
    needed = {layer_file(directory, layer).name, state_files(directory, layer + 1)[0].name}
    return isinstance(entry, dict) and entry.keys() >= needed and None not in entry.values()


def _write(directory: Path, entries: list[Entry]) -> None:
    path = directory / _NAME
    with named_errors(path):
        if not entries:
            remove(path)
            return
        write_whole(path, json.dumps({"layers": entries}, indent=2, sort_keys=True).encode() + b"\n")
