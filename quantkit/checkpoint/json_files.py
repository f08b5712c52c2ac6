"""JSON objects from untrusted files: bounded, unambiguous, and such that they can be written again."""

import json
import stat
from pathlib import Path
from typing import Any

from quantkit.errors import SourceError

MOST_BYTES = 16 << 20  # of a document that people could read
MOST_INDEX_BYTES = 256 << 20  # 497,220 tensors are 70 MB
_MAX_DEPTH = 64
_AGAIN = "download it again"


def read_json(path: Path, *, what: str, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """A JSON object; ``what`` says why it is needed. Raises SourceError for anything that is not one.

    Duplicate keys (the last would win in silence), NaN and Infinity (no JSON), lone surrogates and deep nesting
    (neither can be written again) are refused.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise SourceError("is not a regular file", file=path.name, remedy=what)
        if status.st_size > most_bytes:
            raise SourceError("is too large to be JSON", file=path.name, remedy=_AGAIN)
        with path.open("rb") as stream:
            raw = stream.read(most_bytes)
    except FileNotFoundError as error:
        raise SourceError("is missing", file=path.name, remedy=what) from error
    except OSError as error:
        raise SourceError(f"cannot be read ({error.strerror})", file=path.name, remedy=what) from error
    try:
        document = json.loads(raw, object_pairs_hook=_unique, parse_constant=_refuse_constant)
        if b"\\ud" in raw.lower():
            json.dumps(document, ensure_ascii=False).encode()
        _check_depth(document)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"is not JSON ({error})", file=path.name, remedy=_AGAIN) from error
    if not isinstance(document, dict):
        raise SourceError("is not a JSON object", file=path.name, remedy=_AGAIN)
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} stands twice")
    return document


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def _check_depth(document: Any) -> None:
    level, depth = [document], 0
    while level:
        depth += 1
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested more than {_MAX_DEPTH} deep")
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below.extend(one for one in value.values() if isinstance(one, dict | list))
            elif isinstance(value, list):
                below.extend(one for one in value if isinstance(one, dict | list))
        level = below
