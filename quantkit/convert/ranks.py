"""Several processes on one file system, started by whatever starts processes: each makes its share, one completes.

A shard is the unit: no file has two writers. Shares follow from the plan alone.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.checkpoint.output import OutputDirectory, check_target
from quantkit.convert.conversion import Conversion, told_what_is_kept, work
from quantkit.convert.convert import ConvertReport, complete
from quantkit.convert.execution import Execution
from quantkit.convert.journal import Entries, read_journals
from quantkit.convert.run import begun_world_size
from quantkit.errors import UsageError
from quantkit.plan.plan import Plan

_MOST_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What a rank has made, now and before, and where it lies."""

    rank: int
    world_size: int
    partial: Path
    num_shards: int
    num_tensors: int


def shares(plan: Plan, world_size: int) -> tuple[frozenset[str], ...]:
    """Source shards of every rank: the largest that is left goes to whoever has the least to do."""
    loads = [0] * world_size
    names: list[set[str]] = [set() for _ in range(world_size)]
    for source in sorted(plan.checkpoint.shards, key=lambda source: (-source.file_bytes, source.name)):
        rank = min(range(world_size), key=lambda rank: (loads[rank], rank))
        loads[rank] += source.file_bytes
        names[rank].add(source.name)
    return tuple(map(frozenset, names))


def convert_share(conversion: Conversion) -> RankReport:
    """Make the share of one rank; a rank that died and is started again goes on from what it had finished."""
    rank = conversion.rank
    assert rank is not None
    if not 0 <= rank < conversion.world_size:
        raise UsageError(f"--rank {rank} is none of {conversion.world_size}", remedy="ranks count from 0")
    check_target(conversion.target, conversion.plan.checkpoint.directory)
    own = shares(conversion.plan, conversion.world_size)[rank]
    with OutputDirectory(conversion.target, rank=rank) as output, told_what_is_kept(conversion, output):
        conversion.begin(output)
        plan, execution = work(conversion, output, own)
        made = [shard for shard in plan.shards if shard.name in execution.output_records]
        return RankReport(
            rank=rank,
            world_size=conversion.world_size,
            partial=output.directory,
            num_shards=len(made),
            num_tensors=sum(len(shard.specs) for shard in made),
        )


def finalize(conversion: Conversion) -> ConvertReport:
    """Complete what the ranks have made. Raises UsageError that names the ranks whose work is missing."""
    check_target(conversion.target, conversion.plan.checkpoint.directory)
    output = OutputDirectory(conversion.target)
    if not output.work.is_dir():
        raise UsageError(
            "is not there: no rank has begun", file=output.directory, remedy="run the ranks first, with the same -o"
        )
    with output:
        conversion = replace(conversion, world_size=begun_world_size(output.work))
        with told_what_is_kept(conversion, output):
            return _finalize(conversion, output)


def _finalize(conversion: Conversion, output: OutputDirectory) -> ConvertReport:
    conversion.begin(output)
    done = conversion.believed(output, read_journals(output.work))
    _check_all_there(conversion, done)
    output.clear(set(done.outputs))
    plan, _ = conversion.with_sidecars(output, frozenset())
    execution = Execution()
    execution.restore(done)
    execution.earlier_bytes = plan.checkpoint.num_bytes
    return complete(conversion, plan, output, execution)


def _check_all_there(conversion: Conversion, done: Entries) -> None:
    planned = {shard.name for shard in conversion.plan.shards}
    missing = []
    for rank, names in enumerate(shares(conversion.plan, conversion.world_size)):
        lost = sorted((names - done.sources.keys()) | ((names & planned) - done.outputs.keys()))
        if lost:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            missing.append(f"rank {rank} ({lost[0]}{more})")
    if missing:
        named = ", ".join(missing[:_MOST_NAMED])
        more = f" and {len(missing) - _MOST_NAMED} more ranks" if len(missing) > _MOST_NAMED else ""
        raise UsageError(
            f"work is missing of {named}{more}",
            file=conversion.target,
            remedy="start these ranks again: each goes on from what it has finished",
        )
