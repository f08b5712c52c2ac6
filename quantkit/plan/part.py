"""A part of a plan that was made, and checked, whole: what a smoke run converts."""

from collections.abc import Mapping
from dataclasses import replace

from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import UsageError
from quantkit.families import FAMILIES
from quantkit.module_names import layer_of
from quantkit.plan.limits import Limits, Partial
from quantkit.plan.plan import Job, Plan, PlannedShard
from quantkit.weights.binding import Binding
from quantkit.weights.completeness import text_root


def limited(plan: Plan, limits: Limits) -> Plan:
    """The jobs that the limits leave, and the source shards that these need; config, rules and checks stay whole.

    Layers are those of the text model, draft (MTP) layers behind the decoder's. What lies in no layer (embedding, final
    norm, head, vision tower) is always part of it: engines load the first layers alone, given a config that counts so
    many, and nothing without its ends. Shards are counted behind the choice of layers.

    Raises UsageError for layers that there are not.
    """
    shards = plan.shards if limits.layers is None else _with_layers(plan, limits.layers)
    shards = shards[: limits.num_shards]
    if not shards:
        raise UsageError("the limits leave no weight", remedy="choose other --layers, or leave --layers out")
    partial = Partial(
        limits=limits,
        num_shards=len(shards),
        whole_shards=len(plan.shards),
        num_weights=sum(len(shard.jobs) for shard in shards),
        whole_weights=sum(1 for _ in plan.jobs),
    )
    return replace(
        plan,
        shards=shards,
        checkpoint=_needed(plan.checkpoint, shards),
        partial=partial,
        warnings=(partial.notice, *plan.warnings),
    )


def _needed(checkpoint: Checkpoint, shards: tuple[PlannedShard, ...]) -> Checkpoint:
    parts = [part for shard in shards for job in shard.jobs for part in job.weight.parts.values()]
    files = {part.path.name for part in parts} | {shard.name for shard in shards}
    begins = {(part.path, part.begin) for part in parts}  # fused experts are runs of one tensor, and never parted
    return replace(
        checkpoint,
        shards=tuple(source for source in checkpoint.shards if source.name in files),
        tensors={name: tensor for name, tensor in checkpoint.tensors.items() if (tensor.path, tensor.begin) in begins},
    )


def _with_layers(plan: Plan, layers: tuple[int, int]) -> tuple[PlannedShard, ...]:
    first, last = layers
    numbers = _layers(plan)
    num_layers = _num_layers(plan, numbers)
    if not first <= last < num_layers:
        there = f"there are 0 to {num_layers - 1}" if num_layers else "no weight lies in one"
        raise UsageError(f"--layers {first}-{last} names layers that there are not", remedy=f"{there}; give A-B")
    kept = []
    for shard in plan.shards:
        jobs = tuple(job for job in shard.jobs if first <= numbers.get(job.weight.name, first) <= last)
        if jobs:
            kept.append(_reduced(shard, jobs))
    return tuple(kept)


def _reduced(shard: PlannedShard, jobs: tuple[Job, ...]) -> PlannedShard:
    names = {output.name for job in jobs for output in job.outputs.values()}
    return replace(shard, jobs=jobs, specs={name: spec for name, spec in shard.specs.items() if name in names})


def _layers(plan: Plan) -> dict[str, int]:
    """Weight to layer, of those that lie in one."""
    weights = {job.weight.name: job.weight for job in plan.jobs}
    root = text_root(Binding(weights=weights, dropped={}))
    layers = {name: layer_of(name) for name in weights}
    return {name: layer.number for name, layer in layers.items() if layer is not None and layer.root == root}


def _num_layers(plan: Plan, numbers: Mapping[str, int]) -> int:
    family = FAMILIES[plan.family]
    if family.is_known:
        config = plan.checkpoint.config
        return family.num_layers(config) + family.num_mtp_layers(config)
    return max(numbers.values(), default=-1) + 1
