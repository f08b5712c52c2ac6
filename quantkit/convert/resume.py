"""Which of the work that a journal names is believed: nothing that does not hash as it did."""

from collections.abc import Callable, Iterator
from pathlib import Path

from quantkit.checkpoint.reader import hash_file
from quantkit.checkpoint.source import Shard
from quantkit.convert.journal import Entries, OutputEntry, SourceEntry
from quantkit.errors import UsageError
from quantkit.integrity.manifest import FileRecord
from quantkit.plan.plan import Plan, PlannedShard
from quantkit.threads import FollowUps, ReportProgress, Step, run_steps


def input_stamps(plan: Plan, shard: PlannedShard) -> dict[str, str]:
    """Stamps, as they are now, of the source shards that an output shard is made from."""
    stamps = {source.name: source.stamp for source in plan.checkpoint.shards}
    names = {part.path.name for job in shard.jobs for part in job.weight.parts.values()}
    return {name: stamps[name] for name in sorted(names & stamps.keys())}


def believed(
    plan: Plan, directory: Path, entries: Entries, *, num_jobs: int, report_progress: ReportProgress
) -> Entries:
    """Entries whose files are what they were; a shard that is not is made again.

    Raises UsageError where the source of a finished shard has changed: it would be a mixture of two.
    """
    sources = {source.name: source for source in plan.checkpoint.shards}
    planned = {shard.name: shard for shard in plan.shards}
    outputs = {name: entry for name, entry in entries.outputs.items() if name in planned}
    found = _hash_all(
        [
            *((directory / name, entry.record) for name, entry in outputs.items()),
            *((source.path, entry.record) for source, entry in _changed(sources, entries)),
        ],
        num_jobs=num_jobs,
        report_progress=report_progress,
    )
    good = Entries()
    for name, source_entry in entries.sources.items():
        source = sources.get(name)
        if source is not None and (source.stamp == source_entry.stamp or found[source.path]):
            good.sources[name] = SourceEntry(record=source_entry.record, stamp=source.stamp)
    for name, entry in outputs.items():
        if found[directory / name]:
            _check_inputs(plan, planned[name], entry, good)
            good.outputs[name] = entry
    return good


def _changed(sources: dict[str, Shard], entries: Entries) -> Iterator[tuple[Shard, SourceEntry]]:
    """Source shards that were hashed and have another stamp now: touched, copied, or another file."""
    for name, entry in entries.sources.items():
        if name in sources and sources[name].stamp != entry.stamp:
            yield sources[name], entry


def _check_inputs(plan: Plan, shard: PlannedShard, entry: OutputEntry, good: Entries) -> None:
    for name, stamp in input_stamps(plan, shard).items():
        if entry.inputs.get(name) != stamp and name not in good.sources:
            raise UsageError(
                f"has changed, or may have, since {shard.name} was made from it",
                file=name,
                remedy="put the old one back, or give --no-resume to start over",
            )


def _hash_all(
    files: list[tuple[Path, FileRecord]], *, num_jobs: int, report_progress: ReportProgress
) -> dict[Path, bool]:
    """Whether each file has the length and the hash that it is said to have."""
    follow_ups, found = FollowUps(), {}
    total_bytes = sum(record.file_bytes for _, record in files)

    def step_of(path: Path, record: FileRecord) -> Step:
        def step() -> Callable[[], None]:
            has_length = path.is_file() and not path.is_symlink() and path.stat().st_size == record.file_bytes
            is_same = has_length and hash_file(path, stop=follow_ups.stop) == record.sha256

            def book() -> None:
                found[path] = is_same
                report_progress(record.file_bytes, total_bytes)

            return book

        return step

    run_steps((step_of(path, record) for path, record in files), num_jobs=num_jobs, follow_ups=follow_ups)
    return found
