"""Were statistics made from the model that is planned? Their fingerprint says it, where the weights are at hand."""

from pathlib import Path

from quantkit.checkpoint.header import read_header
from quantkit.families import FAMILIES
from quantkit.plan.plan import Plan
from quantkit.statistics.file import check_fingerprint, fingerprint_of
from quantkit.statistics.fingerprint import Fingerprint
from quantkit.weights.binding import Binding
from quantkit.weights.identity import model_fingerprint


def check_model(plan: Plan, fingerprint: Fingerprint, path: Path) -> tuple[str, ...]:
    """Warnings where it cannot be told. Raises SourceError for statistics of another model; ``path``: their file."""
    if plan.checkpoint.is_assumed or not all(shard.path.is_file() for shard in plan.checkpoint.shards):
        return (f"whether {path.name} is of this very model is not known: its weights are not on this disk",)
    binding = Binding(weights={job.weight.name: job.weight for job in plan.jobs}, dropped={})
    own = model_fingerprint(binding, FAMILIES[plan.family], plan.checkpoint.config)
    check_fingerprint(fingerprint, own, path)
    return ()


def check_statistics(plan: Plan, path: Path) -> tuple[str, ...]:
    """The same of a file that need not say what model it is of."""
    fingerprint = fingerprint_of(read_header(path).metadata)
    return () if fingerprint is None else check_model(plan, fingerprint, path)
