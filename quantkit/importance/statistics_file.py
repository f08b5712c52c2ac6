"""Entries of this tool's own statistics."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from quantkit.errors import SourceError
from quantkit.importance.file import MOST_CHARACTERS, REMEDY, Entry
from quantkit.statistics.file import SAMPLES_KEY, Statistics, open_statistics
from quantkit.statistics.fingerprint import Fingerprint
from quantkit.statistics.names import SECOND_MOMENT, TOKEN_COUNT
from quantkit.tensors import F32, I64

_NOT_TOLD = ("format", SAMPLES_KEY)


def read_statistics(path: Path) -> tuple[Mapping[str, Entry], Mapping[str, str], Fingerprint]:
    """Entries by module, what the file says of itself, and the fingerprint of its model."""
    statistics = open_statistics(path)
    entries = {
        name.removesuffix(SECOND_MOMENT): _entry(statistics, name.removesuffix(SECOND_MOMENT))
        for name in statistics.tensors
        if name.endswith(SECOND_MOMENT)
    }
    about = {key: value[:MOST_CHARACTERS] for key, value in sorted(statistics.metadata.items()) if key not in _NOT_TOLD}
    return entries, about, statistics.fingerprint


def _entry(statistics: Statistics, module: str) -> Entry:
    """Experts of a layer share one count, under ``experts.token_count``."""
    values = statistics.tensors[module + SECOND_MOMENT]
    owner = module if len(values.spec.shape) == 1 else module.rpartition(".")[0]
    count = statistics.tensors.get(owner + TOKEN_COUNT)
    num_rows = 1 if len(values.spec.shape) == 1 else values.spec.shape[0] if len(values.spec.shape) == 2 else 0
    problem = ""
    if values.spec.dtype != F32 or not num_rows:
        problem = f"is {values.spec}, not F32 [channels] or [experts, channels]"
    elif count is None:
        problem = f"stands without {owner}{TOKEN_COUNT}"
    elif count.spec.dtype != I64 or count.spec.num_elements != num_rows:
        problem = f"is counted by {count.spec}, not by {num_rows} I64"
    if problem or count is None:
        raise SourceError(problem, tensor=values.name, file=statistics.path, remedy=REMEDY)
    tokens = statistics.read(count.name).reshape(-1).astype(np.int64).tolist()
    return Entry(values=values, tokens=tuple(tokens))
