"""Where numba keeps compiled kernels: a folder named after the digest of every source file that goes into them.

numba itself notices only the time stamp of the file that holds a kernel. A kernel also contains what that file
imports, and an installed package may have any time stamp: old code would write old bytes in silence.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import njit

_config: Any = numba.config  # made at run time, unknown to type checkers
_HERE = Path(__file__).parent
_PROBE_BYTES = 1 << 20  # about what the compiled kernels take: a full disk is no cache


def compiled(function: Callable[..., Any]) -> Any:
    """Compiled without the GIL, and cached where any of the usual places may be written to."""
    if _DIRECTORY is None:
        return njit(nogil=True)(function)
    given = _config.CACHE_DIR
    _config.CACHE_DIR = str(_DIRECTORY)
    try:
        return njit(nogil=True, cache=True)(function)
    finally:
        _config.CACHE_DIR = given


def source_digest(directory: Path = _HERE) -> str:
    """Digest of the sources in a folder, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _cache_directory() -> Path | None:
    """The place that numba's own variable names, else beside the sources, else the user's cache; None if all refuse."""
    places = [Path(_config.CACHE_DIR)] if _config.CACHE_DIR else [_HERE / "__pycache__"]
    places.append(Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")))  # noqa: PTH111 (never raises)
    for place in places:
        directory = place / "quantkit-kernels" / source_digest()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory) as probe:
                probe.write(bytes(_PROBE_BYTES))
            return directory
        except OSError:
            continue
    return None


_DIRECTORY = _cache_directory()
