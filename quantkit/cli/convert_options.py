"""The options of `convert` that say who does the work and how, and of how much; what does not go together."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli import options as opt
from quantkit.cli.fetching import KeepSourceOption
from quantkit.errors import UsageError
from quantkit.registry import one_of

if TYPE_CHECKING:
    from quantkit.plan.limits import Limits

EXECUTORS = ("local", "ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkOptions:
    """How shards come, which processes work on them, in how much memory, and where the output goes in the end."""

    spool_gib: opt.SpoolOption = None
    keep_source: KeepSourceOption = False
    resume: opt.ResumeOption = True
    accept_complete: Annotated[
        bool,
        typer.Option(
            "--accept-complete", help="Where OUTPUT is complete and of this very command, leave it and succeed."
        ),
    ] = False
    rank: Annotated[
        int | None,
        typer.Option("--rank", metavar="R", help="Make the share of rank R, from 0, of --world-size processes."),
    ] = None
    world_size: Annotated[
        int | None,
        typer.Option("--world-size", metavar="W", help="Processes, on one or many machines, that share OUTPUT's disk."),
    ] = None
    finalize: Annotated[bool, typer.Option("--finalize", help="Publish what all ranks have made.")] = False
    max_memory: Annotated[
        float | None,
        typer.Option(
            "--max-memory", metavar="GIB", help="Of this process [default: what machine or container has left]."
        ),
    ] = None
    executor: Annotated[
        str,
        typer.Option("--executor", metavar="local|ray", help="Threads here, or a Ray cluster that is there already."),
    ] = "local"
    ray_address: Annotated[
        str | None,
        typer.Option("--ray-address", metavar="ADDRESS", help="Of the cluster [default: auto]."),
    ] = None
    push_to: Annotated[
        str | None,
        typer.Option("--push-to", metavar="ORG/NAME", help="Upload the finished output to this repository of the hub."),
    ] = None
    public: Annotated[bool, typer.Option("--public", help="Let everybody read it [default: private].")] = False
    jobs: opt.JobsOption = None
    device: Annotated[
        str,
        typer.Option("--device", metavar="DEVICE", help="cpu, or GPUs: cuda, cuda:0,cuda:1 or cuda:all. Same bytes."),
    ] = "cpu"

    @property
    def is_ray(self) -> bool:
        return self.executor == "ray"

    @property
    def is_alone(self) -> bool:
        """Whether this process does all of the work."""
        return self.rank is None and not self.finalize and self.executor == "local"

    def check(self, *, is_limited: bool, is_dry: bool) -> None:
        """Raise UsageError for options that are none, or do not go together."""
        self._check_executor()
        self._check_device(is_dry=is_dry)
        self._check_pushing(is_limited=is_limited)
        self._check_sharing()

    def num_jobs(self) -> int:
        """Worker threads of this process. Raises UsageError for no memory, ResourceError for too little."""
        from quantkit.plan.resources import choose_jobs

        if self.is_ray:  # nodes of a cluster choose for themselves
            return 1
        return choose_jobs(self.jobs, self._max_memory_bytes(), device=self.device)

    def _max_memory_bytes(self) -> int | None:
        if self.max_memory is None:
            return None
        if not 0 < self.max_memory < 1e6:
            raise UsageError(f"--max-memory {self.max_memory:g} is no memory", remedy="give GiB, 2 say")
        return int(self.max_memory * 2**30)

    def _check_executor(self) -> None:
        one_of("--executor", self.executor, EXECUTORS)
        if not self.is_ray:
            if self.ray_address is not None:
                raise UsageError("--ray-address is an option of --executor ray", remedy="add --executor ray")
            return
        if self.rank is not None or self.finalize:
            raise UsageError("Ray shares the work itself", remedy="leave --rank, --world-size and --finalize out")
        if self.jobs is not None or self.max_memory is not None:
            raise UsageError(
                "every node of a Ray cluster uses the cores that Ray has of it, as its memory allows",
                remedy="leave --jobs and --max-memory out; `ray start --num-cpus` bounds a node",
            )

    def _check_device(self, *, is_dry: bool) -> None:
        """A cluster's nodes look for it themselves."""
        from quantkit.transcode import CPU, choose_kernels, device_names

        device_names(self.device)
        if self.finalize and self.device != CPU:
            raise UsageError("--finalize computes nothing", remedy="leave --device out")
        if not self.is_ray and not is_dry:
            choose_kernels(self.device)

    def _check_pushing(self, *, is_limited: bool) -> None:
        if self.push_to is None:
            if self.public:
                raise UsageError(
                    "--public says who may read what --push-to uploads", remedy="give --push-to org/name too"
                )
            return
        if re.fullmatch(r"[\w.-]+/[\w.-]+", self.push_to) is None:
            raise UsageError(f"--push-to {self.push_to!r} is no name on the hub", remedy="write it as org/name")
        if is_limited:
            raise UsageError("a smoke run is never published", remedy="leave --push-to out, or the limits")
        if self.rank is not None:
            raise UsageError("a rank makes no whole output to push", remedy="give --push-to together with --finalize")

    def _check_sharing(self) -> None:
        from quantkit.convert.run import MOST_RANKS

        if (self.rank is None) != (self.world_size is None):
            raise UsageError("--rank and --world-size go together", remedy="give both, or neither")
        if self.world_size is not None and not 1 <= self.world_size <= MOST_RANKS:
            raise UsageError(f"--world-size {self.world_size} is no number of ranks", remedy=f"give 1 to {MOST_RANKS}")
        if self.finalize and self.rank is not None:
            raise UsageError("--finalize comes after all ranks", remedy="leave --rank and --world-size out")
        if not self.resume and (self.finalize or self.rank is not None):
            raise UsageError(
                "--no-resume would throw away what other ranks have made", remedy="remove the partial directory instead"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeOptions:
    """What a smoke run is limited to."""

    limit_shards: Annotated[
        int | None,
        typer.Option("--limit-shards", min=1, metavar="N", help="Smoke run: the first N output shards only."),
    ] = None
    layers: Annotated[
        str | None,
        typer.Option("--layers", metavar="A-B", help="Smoke run: only layers A to B, and what lies in no layer."),
    ] = None

    def limits(self, work: WorkOptions) -> "Limits | None":
        """None for a whole run. Raises UsageError for layers that are no A-B, and for limits on a shared run."""
        from quantkit.plan.limits import Limits

        if self.limit_shards is None and self.layers is None:
            return None
        if work.rank is not None or work.finalize:
            raise UsageError(
                "a smoke run is made by one process", remedy="leave --rank, --world-size and --finalize out"
            )
        return Limits(num_shards=self.limit_shards, layers=self._first_and_last())

    def _first_and_last(self) -> tuple[int, int] | None:
        if self.layers is None:
            return None
        match = re.fullmatch(r"([0-9]{1,6})-([0-9]{1,6})", self.layers)
        if match is None:
            raise UsageError(f"--layers {self.layers} is no A-B", remedy="give the first and the last layer, as in 0-3")
        return int(match[1]), int(match[2])
