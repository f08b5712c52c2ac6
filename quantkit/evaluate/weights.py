"""Relative errors of an output's weights, as both checkpoints decode: of any form, ours or another tool's.

Legend: R rows, C columns.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from quantkit.codecs.opaque import NativeInt4
from quantkit.families.family import Family
from quantkit.integrity.weight_errors import RowCollector, Sums, WeightError
from quantkit.streaming.decode import decode_rows, is_known
from quantkit.threads import ReportProgress, Stage, Step, run_steps
from quantkit.transcode import has_row_blocks
from quantkit.weights.binding import Binding
from quantkit.weights.weight import Weight

_BLOCK_ELEMENTS = 1 << 23  # that are decoded at a time, where a form allows it
_ROW_STEP = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightErrors:
    """``missing``: weights of the source that the output lacks, or has in another shape or in no known form."""

    errors: tuple[WeightError, ...]
    missing: tuple[str, ...]


def compare_weights(
    source: Binding,
    output: Binding,
    family: Family,
    *,
    num_jobs: int,
    report_progress: ReportProgress = lambda _, __: None,
) -> WeightErrors:
    """Every weight of the source against the output's of the same name."""
    pairs, missing = list[tuple[Weight, Weight]](), list[str]()
    for name, weight in sorted(source.weights.items()):
        other = output.weights.get(name)
        if other is None or other.shape != weight.shape or not (is_known(weight) and is_known(other)):
            missing.append(name)
        else:
            pairs.append((weight, other))
    stage = Stage(label="compare weights", total_bytes=sum(_pair_bytes(*pair) for pair in pairs))
    report_progress(stage, 0)
    rows = RowCollector()

    def steps() -> Iterator[Step]:
        for weight, other in pairs:
            role = family.role_of(weight.name)
            for first, last in _blocks(weight, other):
                yield _step(weight, other, first, last, role)

    def _step(weight: Weight, other: Weight, first: int, last: int, role: str) -> Step:
        def step() -> Callable[[], None]:
            sums = _row_sums(weight, other, first, last)

            def done() -> None:
                rows.add(weight.name, role, weight.num_rows, *sums)
                report_progress(stage, _pair_bytes(weight, other) * (last - first) // max(weight.num_rows, 1))

            return done

        return step

    run_steps(steps(), num_jobs=num_jobs)
    return WeightErrors(errors=tuple(rows.errors), missing=tuple(missing))


def _blocks(*weights: Weight) -> Iterator[tuple[int, int]]:
    """Ranges of rows: all at once where a form does not keep rows apart."""
    num_rows, num_cols = weights[0].num_rows, max(weights[0].num_cols, 1)
    step = max(_BLOCK_ELEMENTS // num_cols // _ROW_STEP, 1) * _ROW_STEP
    if any(isinstance(one.codec, NativeInt4) and not has_row_blocks(one.codec) for one in weights):
        step = num_rows
    for first in range(0, num_rows, step):
        yield first, min(first + step, num_rows)


def _row_sums(weight: Weight, other: Weight, first: int, last: int) -> tuple[Sums, Sums]:
    """Squared error and squared weight of every row."""
    source_RC, output_RC = (decode_rows(one, first, last).reshape(last - first, -1) for one in (weight, other))
    error_R = np.empty(last - first)
    weight_R = np.empty(last - first)
    for begin in range(0, last - first, _ROW_STEP):
        part = slice(begin, begin + _ROW_STEP)
        values_RC = source_RC[part].double()
        weight_R[part] = values_RC.square().sum(-1).numpy()
        error_R[part] = values_RC.sub_(output_RC[part]).square_().sum(-1).numpy()
    return error_R, weight_R


def _pair_bytes(weight: Weight, other: Weight) -> int:
    return weight.stored_bytes + other.stored_bytes
