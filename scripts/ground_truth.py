#!/usr/bin/env python
"""Memory that servers logged, against the memory plan: prints planned, measured and difference of every row.

Rows are public start-up logs and benchmark reports; each stands for one server, so a row is evidence and no proof.
Weights (with the copies that the engine makes of them) and pool in GiB a rank. Bytes a token and the tokens of the
logged pool are one check in two units: that pool is the log's. A pool is planned where the fraction is stated. A figure
is compared only where the source states the layout and flags that it depends on; ``excluded`` says why a row, or a
figure of it, is not compared.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from quantkit.engines.parallel import EngineName, Parallel
from quantkit.memory.budget import GIB
from quantkit.memory.gpus import DEFAULT_GPU, gpu_named
from quantkit.memory.kv_format import KvDtype, KvLayout
from quantkit.memory.make import make_memory_plan
from quantkit.memory.model import Model, model_from_config
from quantkit.memory.plan import MemoryPlan
from quantkit.memory.scheme import Scheme
from quantkit.memory.serving import MemoryRequest
from quantkit.recipe_files import recipe_config, recipe_paths

TEST_CONFIGS = Path(__file__).parent.parent / "tests" / "configs"
# percent
TOLERANCE = {"weights": 2.5, "bytes": 0.5, "tokens": 6.0, "pool": 6.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Of ``ground_truth.json``. ``bytes_tolerance``: percent, where the source rounds (``note`` says how).

    ``scheme``: as served, where that is not as published.
    ``fraction``: as it was set; then the pool is planned too, from the GPU on. ``calibrates``: the overhead band was
    made from this pool, so that planning it again proves nothing.
    """

    name: str
    config: str
    engine: EngineName
    gpu: str = DEFAULT_GPU
    tp: int = 8
    ep: int = 1
    kv_dtype: KvDtype | None = None
    kv_layout: KvLayout | None = None
    scheme: Scheme | None = None
    with_mtp: bool = False
    fraction: float | None = None
    is_eager: bool = False
    weights_gib: float | None = None
    pool_gib: float | None = None
    tokens: int | None = None
    bytes_per_token: float | None = None
    bytes_tolerance: float = TOLERANCE["bytes"]
    calibrates: bool = False
    excluded: str = ""
    source: str = ""
    note: str = ""


_FIGURES = {  # their names and units in the table
    "weights": ("weights and copies", "GiB"),
    "bytes": ("KV bytes of a token", "B"),
    "tokens": ("tokens in the logged pool", "tokens"),
    "pool": ("planned pool", "GiB"),
}


def _read_rows() -> tuple[Row, ...]:
    rows = []
    for entry in json.loads((Path(__file__).parent / "ground_truth.json").read_text()):
        typed = {
            "kv_dtype": None if "kv_dtype" not in entry else KvDtype(entry["kv_dtype"]),
            "kv_layout": None if "kv_layout" not in entry else KvLayout(entry["kv_layout"]),
            "scheme": None if "scheme" not in entry else Scheme(**entry["scheme"]),
        }
        rows.append(Row(**(entry | typed)))
    return tuple(rows)


ROWS = _read_rows()


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One comparison; ``excluded`` where it does not count, ``calibrates`` where the plan was made from the figure."""

    row: str
    what: str
    planned: float
    measured: float
    tolerance: float
    excluded: str
    calibrates: bool

    @property
    def percent(self) -> float:
        return (self.planned - self.measured) / self.measured * 100

    @property
    def is_good(self) -> bool:
        return abs(self.percent) <= self.tolerance


@cache
def model_of(name: str) -> Model:
    """By recipe, or by a config that the tests have."""
    if name in recipe_paths():
        return model_from_config(name, recipe_config(name), weights_from="config")
    config: dict[str, Any] = json.loads((TEST_CONFIGS / f"{name}.json").read_text())
    return model_from_config(name, config, weights_from="config")


def plan_of(row: Row) -> MemoryPlan:
    """As the row says that it was served."""
    request = MemoryRequest(
        gpu=gpu_named(row.gpu),
        engine=row.engine,
        parallel=Parallel(tp=row.tp, ep=row.ep),
        kv_dtype=row.kv_dtype,
        kv_layout=row.kv_layout,
        scheme=row.scheme,
        with_mtp=row.with_mtp,
        fraction=row.fraction,
        is_eager=row.is_eager,
    )
    return make_memory_plan(model_of(row.config), request, with_advice=False)


def figures(row: Row) -> Iterator[Figure]:
    """Weights with copies, bytes per token, tokens of the logged pool, and the pool where it can be planned."""
    plan = plan_of(row)
    stage = plan.stages[0]
    cell = float(stage.cell.num_bytes)

    def figure(what: str, planned: float, measured: float, tolerance: float) -> Figure:
        excluded = row.excluded if what != "weights" else ""
        return Figure(
            row=row.name,
            what=what,
            planned=planned,
            measured=measured,
            tolerance=tolerance,
            excluded=excluded,
            calibrates=row.calibrates and what == "pool",
        )

    if row.weights_gib is not None:
        yield figure("weights", stage.weights_gib + stage.copies_gib, row.weights_gib, TOLERANCE["weights"])
    if row.bytes_per_token is not None:
        yield figure("bytes", cell, row.bytes_per_token, row.bytes_tolerance)
    if row.pool_gib is not None and row.tokens is not None:
        yield figure("bytes", cell, row.pool_gib * GIB / row.tokens, row.bytes_tolerance)
        yield figure("tokens", row.pool_gib * GIB / cell, row.tokens, TOLERANCE["tokens"])
    if row.pool_gib is not None and row.fraction is not None:
        yield figure("pool", stage.budget.pool.mid, row.pool_gib, TOLERANCE["pool"])


def table() -> list[str]:
    """Markdown: every figure of every row."""
    lines = ["| server | fraction | figure | by the plan | logged | difference |", "|---|---|---|---|---|---|"]
    for row in ROWS:
        found = list(figures(row))
        for one in found:
            digits = 2 if one.what in ("weights", "pool") else 0
            name, unit = _FIGURES[one.what]
            note = " (not counted)" if one.excluded else " (made the band)" if one.calibrates else ""
            lines.append(
                f"| {one.row} | {_fraction(row)} | {name} | {one.planned:,.{digits}f} {unit} | "
                f"{one.measured:,.{digits}f} | {one.percent:+.2f} %{note} |"
            )
        if row.excluded:
            lines.append(f"| {row.name} | {_fraction(row)} | | | | {row.excluded} |")
    return lines


def _fraction(row: Row) -> str:
    return "not stated" if row.fraction is None else f"{row.fraction:g}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    sys.stdout.write("\n".join(table()) + "\n")
