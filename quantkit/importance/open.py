"""Which of the formats a file is, by its first bytes."""

from pathlib import Path

from quantkit.checkpoint.header import looks_like_text
from quantkit.checkpoint.reader import hash_file, read_chunks
from quantkit.checkpoint.source import stamp_of
from quantkit.errors import SourceError
from quantkit.importance.dat_file import read_dat
from quantkit.importance.file import ImportanceFile
from quantkit.importance.gguf_file import MAGIC, read_gguf
from quantkit.importance.statistics_file import read_statistics

_FIRST = 256  # bytes that tell a text
_NAME_ONE = "name statistics of quantkit calibrate, an imatrix.gguf or an imatrix.dat"
_BRACE = 8  # where the JSON of safetensors begins, behind its length; in the older format a tensor's name does


def open_importance(path: Path) -> ImportanceFile:
    """Entries and hash of a file; its numbers are read later. Raises SourceError for a file of none of the formats."""
    path = path.absolute()
    if not path.is_file():
        raise SourceError("is not a file", file=path, remedy=_NAME_ONE)
    stamp = stamp_of(path)
    begin = b"".join(bytes(chunk) for chunk in read_chunks(path, 0, min(_FIRST, path.stat().st_size)))
    if looks_like_text(begin):
        raise SourceError("is a text, and no importance matrix", file=path, remedy=_NAME_ONE)
    sha256 = hash_file(path)
    if begin.startswith(MAGIC):
        entries, about = read_gguf(path)
        return ImportanceFile(path=path, kind="imatrix.gguf", sha256=sha256, stamp=stamp, entries=entries, about=about)
    if begin[_BRACE : _BRACE + 1] == b"{":
        entries, about, model = read_statistics(path)
        return ImportanceFile(
            path=path, kind="statistics", sha256=sha256, stamp=stamp, entries=entries, about=about, model=model
        )
    entries, about = read_dat(path)
    return ImportanceFile(path=path, kind="imatrix.dat", sha256=sha256, stamp=stamp, entries=entries, about=about)
