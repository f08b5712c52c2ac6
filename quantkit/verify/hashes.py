"""Files of a directory against what a manifest says of them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from quantkit.errors import SourceError
from quantkit.integrity.file_hashes import hash_files
from quantkit.integrity.manifest import FileRecord
from quantkit.threads import ReportProgress
from quantkit.verify.report import Finding


def check_hashes(
    directory: Path,
    records: Mapping[str, FileRecord],
    *,
    wrong: Finding,
    num_jobs: int,
    report_progress: ReportProgress,
) -> list[Finding]:
    """``wrong``, with the file's name, for every file that is there and has another hash or cannot be read."""
    present = {name: record for name, record in records.items() if (directory / name).is_file()}
    sizes = {directory / name: record.file_bytes for name, record in present.items()}
    found = hash_files(sizes, label=f"check {wrong.check}", num_jobs=num_jobs, report_progress=report_progress)
    findings = []
    for name, record in present.items():
        sha256 = found[directory / name]
        if sha256 != record.sha256:
            message = sha256.message if isinstance(sha256, SourceError) else wrong.message
            findings.append(replace(wrong, message=message, file=name))
    return findings
