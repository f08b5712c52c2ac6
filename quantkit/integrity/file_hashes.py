"""sha256 of many files at once."""

from collections.abc import Callable, Mapping
from pathlib import Path

from quantkit.checkpoint.reader import hash_file
from quantkit.errors import SourceError
from quantkit.threads import FollowUps, ReportProgress, Stage, Step, run_steps


def hash_files(
    files: Mapping[Path, int], *, label: str, num_jobs: int, report_progress: ReportProgress
) -> dict[Path, str | SourceError | None]:
    """Of each file, or why it cannot be read; None where it is not there or has another length than is said here.

    ``label``: what that is done for, as whoever waits reads it.
    """
    follow_ups = FollowUps()
    found: dict[Path, str | SourceError | None] = {}
    stage = Stage(label=label, total_bytes=sum(files.values()))

    def sha256_of(path: Path, file_bytes: int) -> str | SourceError | None:
        if not path.is_file() or path.stat().st_size != file_bytes:
            return None
        try:
            return hash_file(path, stop=follow_ups.stop)
        except SourceError as error:
            return error

    def step_of(path: Path, file_bytes: int) -> Step:
        def step() -> Callable[[], None]:
            sha256 = sha256_of(path, file_bytes)

            def book() -> None:
                found[path] = sha256
                report_progress(stage, file_bytes)

            return book

        return step

    if files:
        report_progress(stage, 0)
    run_steps((step_of(*one) for one in files.items()), num_jobs=num_jobs, follow_ups=follow_ups)
    return found
