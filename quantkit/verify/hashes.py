"""sha256 of many files at once, against what a manifest says."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from quantkit.checkpoint.reader import hash_file
from quantkit.errors import SourceError
from quantkit.integrity.manifest import FileRecord
from quantkit.threads import ReportProgress, Step, run_steps
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
    total_bytes = sum(record.file_bytes for record in present.values())
    bad: dict[str, str] = {}

    def steps() -> Iterator[Step]:
        for name, record in present.items():
            yield lambda name=name, record=record: _step(name, record)  # type: ignore[misc]

    def _step(name: str, record: FileRecord) -> Callable[[], None]:
        message = ""
        try:
            if hash_file(directory / name) != record.sha256:
                message = wrong.message
        except SourceError as error:
            message = error.message

        def book() -> None:
            report_progress(record.file_bytes, total_bytes)
            if message:
                bad[name] = message

        return book

    run_steps(steps(), num_jobs=num_jobs)
    return [
        Finding(check=wrong.check, message=bad[name], file=name, remedy=wrong.remedy) for name in present if name in bad
    ]
