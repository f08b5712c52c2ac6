"""conversion.json: what an output was made from, what it holds, and the sha256 of every file.

Nothing in it varies from run to run: no time, host, path or number of workers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from threading import Event
from typing import Any

from quantkit.checkpoint.disk import write_file
from quantkit.checkpoint.file_names import MANIFEST_NAME
from quantkit.checkpoint.reader import hash_file
from quantkit.errors import SourceError, VerificationError

MANIFEST_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Length and sha256 (hexadecimal) of one file."""

    file_bytes: int
    sha256: str

    def document(self) -> dict[str, Any]:
        return {"bytes": self.file_bytes, "sha256": self.sha256}


def record_of(path: Path, stop: Event | None = None) -> FileRecord:
    """Of a file as it lies here; ``StoppedError`` soon after ``stop``."""
    sha256 = hash_file(path, stop=stop)  # first, because its errors have names
    return FileRecord(file_bytes=path.stat().st_size, sha256=sha256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The parts of conversion.json that are checked; ``document`` is all of it."""

    recipe: Mapping[str, Any]
    source_shards: Mapping[str, FileRecord]
    output_files: Mapping[str, FileRecord]
    document: Mapping[str, Any]


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Deterministic JSON, flushed to the disk."""
    write_file(path, json_bytes(document))


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """As it is stored."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def read_manifest(directory: Path) -> Manifest:
    """Manifest of an output directory. Raises SourceError where there is no directory to speak of, VerificationError
    when the manifest is missing or damaged.
    """
    if not directory.is_dir():
        raise SourceError("is not a directory", file=directory, remedy="name the output of a conversion")
    path = directory / MANIFEST_NAME
    try:
        if path.exists() and not path.is_file():
            raise ValueError("not a regular file")
        document = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise VerificationError(
            "is missing", file=path, remedy="this is not a complete output of quantkit; convert again"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise VerificationError(f"cannot be read ({error})", file=path, remedy="convert again") from error
    try:
        if document["format"] != MANIFEST_FORMAT:
            raise VerificationError(
                f"has format {document['format']!r}, this version reads {MANIFEST_FORMAT}",
                file=path,
                remedy="use the version that wrote it",
            )
        return Manifest(
            recipe=document["recipe"],
            source_shards=_records(document["source"]["shards"]),
            output_files=_records(document["output"]["files"]),
            document=document,
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise VerificationError(f"lacks or garbles {error}", file=path, remedy="convert again") from error


def _records(section: Mapping[str, Any]) -> dict[str, FileRecord]:
    records = {}
    for name, entry in section.items():
        if not name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"the file name {name!r}")
        records[name] = FileRecord(file_bytes=int(entry["bytes"]), sha256=str(entry["sha256"]))
    return records
