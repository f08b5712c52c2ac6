"""The same plan on a Ray cluster that is there already: shards go to whichever node is free, again where one is lost.

All nodes see the output's file system, and a source directory where there is one. A node makes a shard in a folder of
its own attempt; only the driver moves it to its place. So a node that was given up and still writes harms nobody.
"""

import logging
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quantkit.checkpoint.disk import flush, named_errors
from quantkit.checkpoint.output import OutputDirectory
from quantkit.convert.conversion import Conversion
from quantkit.convert.execution import Execution
from quantkit.convert.journal import Entries, Journal, OutputEntry, SourceEntry
from quantkit.convert.local import Share, execute
from quantkit.errors import QuantkitError, ResourceError, UsageError
from quantkit.machine import available_memory_bytes
from quantkit.plan.plan import Plan
from quantkit.plan.resources import choose_jobs
from quantkit.plan.tasks import task_bytes_of
from quantkit.threads import Stage
from quantkit.transcode import ALL_GPUS, CPU, device_names

_SHARDS_PER_NODE = 2  # one is made while another is fetched, flushed or hashed
_LOOK_SECONDS = 5.0  # for nodes that have come
_MOST_LOSSES = 5  # of one shard: then it is the shard that kills them
_ATTEMPTS_NAME = "ray"
_ANSWER_SECONDS = 10
_BEGIN_SECONDS = 120
_REMOVALS, _REMOVAL_SECONDS = 50, 0.1


@dataclass(slots=True, kw_only=True)
class MadeShard:
    """What a node tells of a source shard that it has worked on; kept like a journal, and sent to the driver."""

    outputs: dict[str, OutputEntry] = field(default_factory=dict)
    sources: dict[str, SourceEntry] = field(default_factory=dict)
    encode_seconds: float = 0.0
    encoded_bytes: int = 0

    def add_output(self, name: str, entry: OutputEntry) -> None:
        """As ``Journal`` does."""
        self.outputs[name] = entry

    def add_source(self, name: str, entry: SourceEntry) -> None:
        """As ``Journal`` does."""
        self.sources[name] = entry


class NodeWorker:
    """What runs on a node, as an actor."""

    def __init__(self, conversion: Conversion, work: str) -> None:
        self.conversion, self.work = conversion, Path(work)

    def answer(self) -> None:
        """Nothing: what answers has begun."""

    def make(self, name: str, attempt: str) -> MadeShard:
        """Make one shard in the folder of an attempt. Raises ResourceError where no worker fits into memory."""
        # several shards are in work at once, and share the memory that is free here
        free = available_memory_bytes()
        share = None if free is None else free // _SHARDS_PER_NODE
        device = self.conversion.device
        num_jobs = min(self.conversion.num_jobs, choose_jobs(None, share, device=device))
        folder = attempt_folder(self.work, name, attempt)
        folder.mkdir(parents=True, exist_ok=True)
        plan, only = self.conversion.plan, frozenset({name})
        spool = self.conversion.spool_in(folder / "spool")
        if spool is not None:
            spool.expect(plan, only)
        made = MadeShard()
        own = Share(directory=folder, spool=spool, journal=made, only=only, words=self.conversion.words)
        execution = execute(plan, own, num_jobs=num_jobs, device=device)
        made.encode_seconds, made.encoded_bytes = execution.encode_seconds, execution.encoded_bytes
        return made


def gpus_asked_for(device: str, num_there: int) -> int | None:
    """GPUs of a node that an actor asks for, since Ray hides the others from it; None where it has too few."""
    if device == CPU:
        return 0
    wanted = max(num_there, 1) if device == ALL_GPUS else len(device_names(device))
    return wanted if wanted <= num_there else None


def attempt_folder(work: Path, name: str, attempt: str) -> Path:
    """Where one attempt at a shard writes; its name comes from the driver, and no other driver's is the same."""
    return work / _ATTEMPTS_NAME / f"{name}.{attempt}"


@dataclass(slots=True, kw_only=True)
class RayExecutor:
    """``address``: of the cluster, ``auto`` for the one that this machine belongs to."""

    address: str = "auto"

    def __call__(
        self, conversion: Conversion, plan: Plan, output: OutputDirectory, journal: Journal, done: Entries
    ) -> Execution:
        """Make what is not done. Raises UsageError without a cluster, ResourceError when all nodes are lost."""
        if not ray.is_initialized():
            try:
                self._check_reachable()
                ray.init(address=self.address, log_to_driver=False, logging_level=logging.ERROR)
            except (OSError, ValueError) as error:  # ConnectionError among them
                first_line = (str(error).splitlines() or [""])[0]
                raise UsageError(
                    f"no Ray cluster answers at {self.address!r} ({first_line})",
                    remedy="start one with `ray start --head`, or name it with --ray-address",
                ) from error
        task_bytes = {shard.name: sum(map(task_bytes_of, shard.jobs)) for shard in plan.shards}
        run = _Run(conversion=conversion, plan=plan, output=output, journal=journal, done=done, task_bytes=task_bytes)
        try:
            return run.execute()
        finally:
            run.stop()

    def _check_reachable(self) -> None:
        """Raise OSError where nobody listens: Ray would end this process after a while, without an exception."""
        host, _, port = self.address.rpartition(":")
        if host and port.isdecimal() and "//" not in host:
            socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()


@dataclass(slots=True, kw_only=True)
class _Run:
    conversion: Conversion
    plan: Plan
    output: OutputDirectory
    journal: Journal
    done: Entries
    task_bytes: dict[str, int]  # of each output shard
    execution: Execution = field(default_factory=Execution)
    stage: Stage = field(init=False)
    nodes: dict[str, Any] = field(default_factory=dict)  # by Ray's id of the node, its actor
    driver: str = field(default_factory=lambda: uuid.uuid4().hex)
    running: dict[Any, tuple[str, str, str]] = field(default_factory=dict)  # a call's node, shard and attempt
    losses: dict[str, int] = field(default_factory=dict)
    has_begun: bool = False

    def execute(self) -> Execution:
        self.execution.restore(self.done)
        self.execution.earlier_bytes = sum(self.task_bytes[name] for name in self.done.outputs)
        self.stage = Stage(
            label="convert",
            total_bytes=sum(self.task_bytes.values()),
            earlier_bytes=self.execution.earlier_bytes,
        )
        self.conversion.report_progress(self.stage, 0)
        self._remove_attempts()
        sizes = {source.name: source.file_bytes for source in self.plan.checkpoint.shards}
        planned = {shard.name for shard in self.plan.shards}
        pending = [
            name
            for name in sorted(sizes, key=lambda name: (sizes[name], name))
            if name not in self.done.sources or (name in planned and name not in self.done.outputs)
        ]
        while pending or self.running:
            self._find_nodes()
            for node in self._free_nodes():
                if pending:
                    self._start(node, pending.pop())
            pending += self._collect()
        return self.execution

    def stop(self) -> None:
        """No actor outlives the driver, and no folder of an attempt."""
        for actor in self.nodes.values():
            ray.kill(actor)
        for _ in range(_REMOVALS):  # an actor dies a little later, and may write until then
            self._remove_attempts()
            if not (self.output.work / _ATTEMPTS_NAME).exists():
                return
            time.sleep(_REMOVAL_SECONDS)

    def _remove_attempts(self) -> None:
        folder = self.output.work / _ATTEMPTS_NAME
        if folder.is_symlink():
            folder.unlink()
        shutil.rmtree(folder, ignore_errors=True)

    def _find_nodes(self) -> None:
        """An actor on every node that has cores and none yet."""
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        alive = {node["NodeID"]: node for node in nodes if node["Alive"] and node["Resources"].get("CPU")}
        for gone in self.nodes.keys() - alive.keys():
            del self.nodes[gone]
        for node_id, node in alive.items():
            num_gpus = gpus_asked_for(self.conversion.device, int(node["Resources"].get("GPU", 0)))
            if node_id in self.nodes or num_gpus is None:
                continue
            cores = int(node["Resources"]["CPU"])
            conversion = replace(self.conversion, num_jobs=cores, report_progress=_no_progress)
            worker = ray.remote(NodeWorker).options(
                num_cpus=cores,
                num_gpus=num_gpus,
                max_concurrency=_SHARDS_PER_NODE,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            self.nodes[node_id] = worker.remote(conversion, str(self.output.work))
        if not self.nodes:
            what = "cores" if self.conversion.device == CPU else f"what --device {self.conversion.device} asks for"
            raise ResourceError(
                f"no node of the Ray cluster has {what}", remedy="start nodes, then run the same command again"
            )
        self._await_first()

    def _await_first(self) -> None:
        """Actors wait for cores that others hold, without a word: somebody must begin."""
        if not self.has_begun:
            calls = [actor.answer.remote() for actor in self.nodes.values()]
            self.has_begun = bool(ray.wait(calls, num_returns=1, timeout=_BEGIN_SECONDS)[0])
        if not self.has_begun:
            raise ResourceError(
                f"no node of the Ray cluster has begun within {_BEGIN_SECONDS} s: its cores or GPUs are in use",
                remedy="see `ray status`; end what holds them, then run the same command again",
            )

    def _free_nodes(self) -> Iterator[str]:
        """Those that may get one more, the idlest first."""
        loads = dict.fromkeys(self.nodes, 0)
        for node, _, _ in self.running.values():
            if node in loads:
                loads[node] += 1
        for load in range(_SHARDS_PER_NODE):
            yield from (node for node in sorted(loads) if loads[node] == load)

    def _start(self, node: str, name: str) -> None:
        attempt = f"{self.driver}-{self.losses.get(name, 0)}"
        self.running[self.nodes[node].make.remote(name, attempt)] = (node, name, attempt)

    def _collect(self) -> list[str]:
        """Book what has ended; names of shards whose node was lost come back."""
        ready, _ = ray.wait(list(self.running), num_returns=1, timeout=_LOOK_SECONDS)
        again = []
        for call in ready:
            node, name, attempt = self.running.pop(call)
            try:
                made: MadeShard = ray.get(call)
            except RayTaskError as error:
                if isinstance(error.cause, QuantkitError):
                    raise error.cause from None
                raise
            except RayError as error:  # the node, its actor or the way to it
                self.nodes.pop(node, None)
                self.losses[name] = self.losses.get(name, 0) + 1
                if self.losses[name] == _MOST_LOSSES:
                    raise ResourceError(
                        f"{_MOST_LOSSES} nodes were lost while they made it",
                        file=name,
                        remedy="see Ray's logs of these nodes; with less memory a node, use fewer cores on each",
                    ) from error
                again.append(name)
            else:
                self._book(made, attempt_folder(self.output.work, name, attempt))
        return again

    def _book(self, made: MadeShard, folder: Path) -> None:
        for name, source in made.sources.items():
            self.journal.add_source(name, source)
        for name, entry in made.outputs.items():
            place = self.output.directory / name
            with named_errors(place):
                (folder / name).replace(place)
                flush(self.output.directory)
            self.journal.add_output(name, entry)
            self.conversion.report_progress(self.stage, self.task_bytes[name])
        shutil.rmtree(folder, ignore_errors=True)
        self.execution.restore(Entries(sources=made.sources, outputs=made.outputs))
        self.execution.encode_seconds += made.encode_seconds
        self.execution.encoded_bytes += made.encoded_bytes


def _no_progress(stage: Stage, done: int) -> None:
    pass
