"""Which of the work that a journal names is believed: nothing that does not hash as it did."""

from collections.abc import Mapping
from pathlib import Path

from quantkit.convert.journal import Entries, OutputEntry, SourceEntry
from quantkit.errors import SourceError, UsageError
from quantkit.integrity.file_hashes import hash_files
from quantkit.plan.plan import Plan, PlannedShard
from quantkit.threads import ReportProgress


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
    outputs = {
        name: entry
        for name, entry in entries.outputs.items()
        if name in planned and not (directory / name).is_symlink()
    }
    inputs = {name: _changed_inputs(plan, planned[name], entry) for name, entry in outputs.items()}
    doubtful = {
        name for name, entry in entries.sources.items() if name in sources and sources[name].stamp != entry.stamp
    }
    doubtful |= {name for changed in inputs.values() for name in changed}
    files = {directory / name: entry.record.file_bytes for name, entry in outputs.items()}
    files |= {sources[name].path: sources[name].file_bytes for name in sorted(doubtful)}
    found = _hashed(files, num_jobs=num_jobs, report_progress=report_progress)
    good = Entries(stamped=dict(entries.stamped))
    for name, source_entry in entries.sources.items():
        source = sources.get(name)
        if source is not None and source_entry.record.sha256 == found.get(source.path, source_entry.record.sha256):
            good.sources[name] = SourceEntry(record=source_entry.record, stamp=source.stamp)
    for name, entry in outputs.items():
        if found[directory / name] != entry.record.sha256:
            continue
        other = [one for one in inputs[name] if not _is_known(entries, entry, one, found[sources[one].path])]
        for source_name in other:
            if source_name in outputs:
                raise UsageError(
                    f"has changed, or may have, since {name} was made from it",
                    file=source_name,
                    remedy="put the old one back, or give --no-resume to start over",
                )
        if not other:  # else a shard was repaired that lends it a scale, and is not made itself: both are made anew
            good.outputs[name] = entry
    return good


def _is_known(entries: Entries, entry: OutputEntry, source_name: str, sha256: str | None) -> bool:
    """Whether a source shard hashes as it did when the output was made from it."""
    record = entries.stamped.get((source_name, entry.inputs.get(source_name, "")))
    return record is not None and record.sha256 == sha256


def _changed_inputs(plan: Plan, shard: PlannedShard, entry: OutputEntry) -> list[str]:
    """Source shards that had another stamp when the output was made from them: touched, copied, or another file."""
    return [name for name, stamp in input_stamps(plan, shard).items() if entry.inputs.get(name) != stamp]


def _hashed(files: Mapping[Path, int], *, num_jobs: int, report_progress: ReportProgress) -> dict[Path, str | None]:
    """As ``hash_files`` does; raises SourceError for what cannot be read."""
    found = hash_files(files, label="check finished work", num_jobs=num_jobs, report_progress=report_progress)
    hashed: dict[Path, str | None] = {}
    for path, sha256 in found.items():
        if isinstance(sha256, SourceError):
            raise sha256
        hashed[path] = sha256
    return hashed
