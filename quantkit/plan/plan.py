"""The Plan: every output tensor with its name, dtype, shape, shard and inputs, known before any data is read."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoint.header import encode_header
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.writer import METADATA
from quantkit.codecs.fp8_block import Fp8Block
from quantkit.codecs.int4_group import Int4Group
from quantkit.families.family import Role
from quantkit.importance.cover import Importance
from quantkit.layouts import Layout
from quantkit.plan.limits import Partial
from quantkit.recipe import Recipe
from quantkit.tensors import TensorSpec
from quantkit.weights.weight import Weight


class Action(StrEnum):
    """What happens to a weight on its way to the output."""

    COPY = "copy"
    TO_BF16 = "to bf16"
    TO_FP8 = "to fp8"
    INT4 = "int4"
    RELAYOUT = "relayout"


CARRIED = ("input_scale",)  # parts of native INT4 that go with it where its layout stays


class Output(NamedTuple):
    """One output tensor. ``rows_each``: rows of the weight for one of its own; 0 where it has none of them."""

    name: str
    spec: TensorSpec
    rows_each: int = 1


class Job(NamedTuple):
    """One weight and its output tensors by part; ``scheme`` is set where INT4 is written in the plan's layout.

    ``input_scale``: BF16 bits of a static scale that is written beside it.
    """

    weight: Weight
    role: Role
    action: Action
    outputs: Mapping[str, Output]
    scheme: Int4Group | None = None
    input_scale: int | None = None

    @property
    def is_int4(self) -> bool:
        """Whether the output holds it as INT4, made here or native."""
        return self.scheme is not None or self.weight.is_native_int4

    @property
    def is_fp8(self) -> bool:
        """Whether the output holds it in FP8 blocks."""
        is_kept = self.action == Action.COPY and isinstance(self.weight.codec, Fp8Block)
        return is_kept or self.action == Action.TO_FP8

    def row_bytes(self, part: str) -> int:
        """Of one row of an output that has any; a weight of any rank counts as a matrix."""
        output = self.outputs[part]
        return output.spec.num_bytes // max(1, -(-self.weight.num_rows // output.rows_each))

    @property
    def rows_at_least(self) -> int:
        """Rows that belong together: tasks begin at multiples of it."""
        if self.scheme is not None and self.scheme.smoothed == "columns":
            return max(1, self.weight.num_rows)
        return max((output.rows_each for output in self.outputs.values()), default=1)

    @property
    def carried(self) -> tuple[str, ...]:
        """Parts that are copied beside INT4 that is laid out anew."""
        is_carried = self.action == Action.RELAYOUT and self.input_scale is None
        return tuple(part for part in CARRIED if part in self.outputs) if is_carried else ()

    def constants(self, layout: Layout) -> Mapping[str, NDArray[Any]]:
        """Parts that do not depend on the weight's values."""
        constants = dict(layout.constants(self.weight.num_rows, self.weight.num_cols))
        if self.input_scale is not None:
            constants["input_scale"] = np.array(self.input_scale, dtype=np.uint16)
        return constants

    @property
    def output_bytes(self) -> int:
        return sum(output.spec.num_bytes for output in self.outputs.values())


@dataclass(frozen=True, kw_only=True)
class PlannedShard:
    """One output file: its jobs in source order, its tensors in file order."""

    name: str
    jobs: tuple[Job, ...]
    specs: Mapping[str, TensorSpec]

    @cached_property
    def tensor_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs.values())

    @cached_property
    def file_bytes(self) -> int:
        """Header included."""
        return len(encode_header(self.specs, METADATA)) + self.tensor_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCount:
    """How many weights a rule decided."""

    rule: str
    action: str
    num_weights: int


# source codecs in words, for people
SOURCE_WORDS = {"fp8_block": "fp8", "float_values": "float", "native_int4": "native int4", "opaque": "bytes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTotal:
    """All weights of one role that share an action and a source codec."""

    role: Role
    action: Action
    codec: str
    num_weights: int
    num_elements: int
    source_bytes: int
    output_bytes: int

    @property
    def source(self) -> str:
        """The source codec in words."""
        return SOURCE_WORDS[self.codec]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Complete and checked. ``config`` is the output's config.json.

    ``is_incomplete``: weights that the source's config promises are missing, by the user's leave. ``partial``: what
    is left of a plan of the whole, in a smoke run. ``importance``: what the search of scales is weighted by.
    """

    recipe: Recipe
    family: str
    layout: Layout
    checkpoint: Checkpoint
    shards: tuple[PlannedShard, ...]
    config: Mapping[str, Any]
    rules: tuple[RuleCount, ...]
    dropped: Mapping[str, str]
    warnings: tuple[str, ...]
    is_incomplete: bool = False
    partial: Partial | None = None
    importance: Importance | None = None

    @property
    def jobs(self) -> Iterator[Job]:
        return (job for shard in self.shards for job in shard.jobs)

    @property
    def tensor_bytes(self) -> int:
        return sum(shard.tensor_bytes for shard in self.shards)

    @property
    def num_tensors(self) -> int:
        return sum(len(shard.specs) for shard in self.shards)

    @property
    def weight_map(self) -> dict[str, str]:
        """Tensor name to shard name, sorted by tensor name."""
        return dict(sorted((name, shard.name) for shard in self.shards for name in shard.specs))

    @cached_property
    def int4_share(self) -> float:
        """Share of the elements that are INT4 in the output."""
        total = sum(job.weight.num_elements for job in self.jobs)
        return sum(job.weight.num_elements for job in self.jobs if job.is_int4) / total if total else 0.0

    @cached_property
    def parts(self) -> tuple[PartTotal, ...]:
        """Totals by role, action and source codec, largest output first."""
        groups: dict[tuple[Role, Action, str], list[Job]] = defaultdict(list)
        for job in self.jobs:
            groups[job.role, job.action, job.weight.codec.name].append(job)
        totals = [
            PartTotal(
                role=role,
                action=action,
                codec=codec,
                num_weights=len(jobs),
                num_elements=sum(job.weight.num_elements for job in jobs),
                source_bytes=sum(job.weight.stored_bytes for job in jobs),
                output_bytes=sum(job.output_bytes for job in jobs),
            )
            for (role, action, codec), jobs in groups.items()
        ]
        return tuple(sorted(totals, key=lambda total: (-total.output_bytes, total.role, total.action, total.codec)))
