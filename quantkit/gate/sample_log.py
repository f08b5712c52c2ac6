"""Reads sample logs: a file, or a directory of a run with a file for each task, in folders of models or not."""

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import SourceError, UsageError
from quantkit.gate.sample import Sample, parse_sample, place

NO_TASK = "all"  # the task of a file that names none
MOST_LINE_BYTES = 64 << 20
_SUFFIX = ".jsonl"
_DATE = r"_\d{4}-\d\d-\d\dT\d\d[-:]\d\d[-:]\d\d(\.\d+)?"
_HARNESS_NAME = re.compile(rf"samples_(?P<task>.+?)({_DATE})?\.jsonl")

Key = tuple[str, str]  # task and filter


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLog:
    """All samples of one side, by task and filter and then by id. ``files``: devices and inodes of what was read."""

    path: Path
    files: frozenset[tuple[int, int]]
    samples: Mapping[Key, Mapping[str, Sample]]


def read_log(path: Path) -> SampleLog:
    """Every line of every file. Raises SourceError with file and line for what cannot be used."""
    samples: dict[Key, dict[str, Sample]] = {}
    inodes = set()
    for file, task in _files(path):
        num_before = sum(map(len, samples.values()))
        for sample in _read_file(file, task):
            of_task = samples.setdefault((sample.task, sample.filter), {})
            earlier = of_task.setdefault(sample.id, sample)
            if earlier is not sample:
                raise SourceError(
                    f"id {sample.id} of task {sample.task}, filter {sample.filter} stands in {earlier.place}, too",
                    file=sample.place,
                    remedy="give one run; of several, the mean of each question",
                )
        if sum(map(len, samples.values())) == num_before:
            raise SourceError("is empty", file=file, remedy="run the evaluation again, or remove the file")
        status = file.stat()
        inodes.add((status.st_dev, status.st_ino))
    return SampleLog(path=path, files=frozenset(inodes), samples=samples)


def check_two_logs(baseline: SampleLog, candidate: SampleLog) -> None:
    """Raise UsageError for a file that both sides read."""
    if baseline.files & candidate.files:
        raise UsageError(
            "is a log that both sides read, which lies within any drop of itself",
            file=candidate.path,
            remedy="give the log of BASELINE and that of CANDIDATE",
        )


def _files(path: Path) -> list[tuple[Path, str]]:
    """Files with the task that each one's name says, in an order of their own."""
    try:
        is_directory = stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        raise SourceError(
            f"cannot be read ({error.strerror})", file=path, remedy="give a sample log, or a directory of them"
        ) from error
    if not is_directory:
        return [(path, _task(path, NO_TASK))]
    files = sorted(
        Path(folder, name)
        for folder, _, names in os.walk(path, onerror=_refuse)
        for name in names
        if name.endswith(_SUFFIX)
    )
    if not files:
        raise SourceError(
            "holds no sample log (*.jsonl)", file=path, remedy="give the folder that lm_eval --log_samples wrote"
        )
    return [(file, _task(file, file.stem)) for file in files]


def _refuse(error: OSError) -> None:
    raise SourceError(f"cannot be read ({error.strerror})", file=error.filename, remedy="check its permissions")


def _task(path: Path, otherwise: str) -> str:
    match = _HARNESS_NAME.fullmatch(path.name)
    return match["task"] if match else otherwise


def _read_file(path: Path, task: str) -> Iterator[Sample]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise SourceError("is not a regular file", file=path, remedy="give a sample log")
        with path.open("rb") as stream:
            line = 0
            while raw := stream.readline(MOST_LINE_BYTES + 1):
                line += 1
                if len(raw) > MOST_LINE_BYTES:
                    raise SourceError(
                        f"is longer than {MOST_LINE_BYTES >> 20} MiB", file=place(path, line), remedy="leave texts out"
                    )
                if raw.strip():
                    yield parse_sample(raw, path, line, task)
    except OSError as error:
        raise SourceError(f"cannot be read ({error.strerror})", file=path, remedy="check its permissions") from error
