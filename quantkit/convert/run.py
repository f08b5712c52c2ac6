"""What a run is, written down as it begins: whoever comes with something else is refused, by what differs."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit import __version__
from quantkit.checkpoint.begun import WHY, differences, differences_text, short
from quantkit.checkpoint.disk import named_errors, write_whole
from quantkit.checkpoint.file_names import RUN_NAME
from quantkit.checkpoint.json_files import read_json
from quantkit.convert.journal import JOURNALS
from quantkit.errors import UsageError
from quantkit.plan.plan import Plan, PlannedShard
from quantkit.recipe import recipe_document

_LOCK_NAME = "run.lock"
_FORMAT = 1
MOST_RANKS = 4096
_CONSEQUENCES = ("outputs.", "source.shards.")
_TOLD = ("source.commit", "importance.sha256")  # hashes that a user may know: both are shown


def run_document(
    plan: Plan, provenance: Mapping[str, str], *, world_size: int, words_sha256: str | None = None
) -> dict[str, Any]:
    """What makes a run this one: the tool, its limits, the recipe, the source's config and headers, every decision."""
    checkpoint = plan.checkpoint
    return {
        "format": _FORMAT,
        "version": __version__,
        "partial": None if plan.partial is None else plan.partial.document(),
        "recipe": recipe_document(plan.recipe),
        "importance": None if plan.importance is None else plan.importance.identity(),
        "world_size": world_size,
        "words": words_sha256,
        "is_incomplete": plan.is_incomplete,
        "source": {
            **provenance,
            "config": _digest(checkpoint.config, checkpoint.quantization),
            "sidecars": _digest([[one.name, one.file_bytes] for one in checkpoint.sidecars.copied]),
            "shards": {
                shard.name: _digest(shard.file_bytes, [[one.name, str(one.spec), one.begin] for one in shard.tensors])
                for shard in checkpoint.shards
            },
        },
        "outputs": {shard.name: _decisions(shard) for shard in plan.shards},
    }


def _decisions(shard: PlannedShard) -> str:
    jobs = [[job.weight.name, job.action, str(job.scheme)] for job in shard.jobs]
    return _digest(jobs, {name: str(spec) for name, spec in shard.specs.items()})


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def begin_run(work: Path, document: Mapping[str, Any]) -> None:
    """Write down what the run is, or compare with what is written. Raises UsageError that names what differs."""
    path = work / RUN_NAME
    content = json.dumps(document).encode()
    with named_errors(path), _alone(work):
        if not path.exists():
            for journal in work.glob(JOURNALS):  # of a run that nobody knows any more
                journal.unlink()
            write_whole(path, content)
        there = read_json(path, what=WHY)
    found = list(differences(there, json.loads(content), _TOLD))
    # what follows from another recipe or another limit is no news beside it
    found = [one for one in found if not one.startswith(_CONSEQUENCES)] or found
    if found:
        raise UsageError(
            f"holds work of a run that differs: {differences_text(found)}",
            file=work.parent,
            remedy=_same_revision(there)
            + "repeat that run's command, or choose another -o; to start over, "
            + ("give --no-resume" if max(document["world_size"], _ranks_of(there)) == 1 else "remove the directory"),
        )


def _same_revision(there: Mapping[str, Any]) -> str:
    """A branch of the hub moves; the commit that it stood for can be named."""
    source = there.get("source")
    if not isinstance(source, Mapping) or not (source.get("hub_id") and source.get("commit")):
        return ""
    return f"to go on with its revision, convert {source['hub_id']}@{source['commit']}; or "


def _ranks_of(document: Mapping[str, Any]) -> int:
    world_size = document.get("world_size")
    return world_size if type(world_size) is int else 1


def begun_world_size(work: Path) -> int:
    """Ranks of the run that has begun here. Raises UsageError where none has."""
    path = work / RUN_NAME
    if not path.is_file():
        raise UsageError("holds no run", file=work.parent, remedy="run the ranks first, with the same -o")
    world_size = read_json(path, what=WHY).get("world_size")
    if type(world_size) is not int or not 1 <= world_size <= MOST_RANKS:
        raise UsageError(f"says world_size {short(world_size)}", file=path, remedy="give --no-resume to start over")
    return world_size


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    """Ranks begin at the same time: one after the other."""
    lock = os.open(work / _LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
