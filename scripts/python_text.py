"""Text that lies on every Python install: the sources and documents of its standard library, split by file.

A file belongs to one part only, which the digest of its path decides: what a model is trained on, what statistics are
taken from and what it is measured on have no file in common.
"""

import ast
import hashlib
import html
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Part = Literal["training", "calibration", "evaluation"]

# tests and tables of characters are no prose and no code that anybody writes; the rest is missing on some systems
LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "encodings", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
)
SEPARATOR = b"\0"
MIN_BYTES = 400


def files_of(part: Part) -> Iterator[Path]:
    """In the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(_python_files(root) | set(root.glob("LICENSE*"))):
        if part_of(path.relative_to(root).as_posix()) == part and path.stat().st_size >= MIN_BYTES:
            yield path


def _python_files(root: Path) -> set[Path]:
    found = set()
    for directory, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        found |= {Path(directory, name) for name in names if name.endswith(".py")}
    return found


def text_of(part: Part) -> bytes:
    """The files of a part in the order of their paths, with a zero byte between two."""
    return SEPARATOR.join(path.read_bytes() for path in files_of(part))


def prose_of(part: Part) -> str:
    """What the files of a part say in English: licences, and every string of several lines that has sentences."""
    texts = []
    for path in files_of(part):
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix == ".py":
            strings = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
            texts += [one.strip() for one in strings if isinstance(one, str) and _is_prose(one)]
        else:
            texts.append(text)
    return "\n\n".join(texts)


def files_of_text(directory: Path, part: Part) -> str:
    """Text of a directory's files in place of the install's: the first half for statistics, the second to measure."""
    texts = []
    for path in sorted(directory.rglob("*")):
        if path.suffix in {".txt", ".html"}:
            text = path.read_text(encoding="utf-8", errors="replace")
            texts.append(html.unescape(re.sub(r"<[^>]*>", "", text)) if path.suffix == ".html" else text)
    half = len(texts) // 2
    return "\n\n".join(texts[half:] if part == "evaluation" else texts[:half])


def byte_tokens(part: Part) -> NDArray[np.int64]:
    """A token is a byte."""
    return np.frombuffer(text_of(part), np.uint8).astype(np.int64)


def windows(tokens: NDArray[np.int64], num_windows: int, length: int) -> NDArray[np.int64]:
    """Windows [num_windows, length] that lie evenly over a text, without overlap where it is long enough."""
    starts = np.linspace(0, len(tokens) - length, num_windows).astype(np.int64)
    found: NDArray[np.int64] = tokens[starts[:, None] + np.arange(length)]
    return found


def part_of(place: str) -> Part:
    """One file of sixteen is for measuring, one for statistics."""
    number = hashlib.sha256(place.encode()).digest()[0] % 16
    return "evaluation" if number == 0 else "calibration" if number == 1 else "training"


def _is_prose(text: str) -> bool:
    return text.count("\n") >= 3 and text.count(". ") + text.count(".\n") >= 2
