"""Memory that servers logged, against the memory plan: prints planned, measured and difference of every row.

Rows are public start-up logs and benchmark reports; each stands for one server, so a row is evidence and no proof.
Weights and pool in GiB a rank. A figure is compared only where the source states the layout and flags that it
depends on; ``excluded`` says why a row, or a figure of it, is not compared.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from quantkit.engines.parallel import EngineName, Parallel
from quantkit.memory.gpus import DEFAULT_GPU, gpu_named
from quantkit.memory.kv_cache import KvDtype, KvLayout
from quantkit.memory.make import make_memory_plan
from quantkit.memory.model import Model, model_from_config
from quantkit.memory.plan import GIB, MemoryPlan, MemoryRequest
from quantkit.memory.scheme import Scheme
from quantkit.recipe_files import recipe_config, recipe_paths

TEST_CONFIGS = Path(__file__).parent.parent / "tests" / "configs"
# percent
TOLERANCE = {"weights": 2.5, "bytes": 0.5, "tokens": 6.0, "pool": 6.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """``bytes_tolerance``: percent, where the source rounds; ``scheme``: as served, where that is not as published.

    ``fraction``: as it was set; then the pool is planned too, from the GPU on.
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
    excluded: str = ""
    source: str = ""


FP8, BF16 = KvDtype.FP8, KvDtype.BF16
ROWS: tuple[Row, ...] = (
    Row(
        name="GLM-5-FP8, 8 x MI355X, SGLang 2026-02",
        config="glm-5",
        engine="sglang",
        gpu="mi355x",
        kv_dtype=FP8,
        kv_layout=KvLayout.PACKED,
        weights_gib=89.58,
        pool_gib=186.77,
        tokens=3_262_823,
        source="https://github.com/ajith-sirra-amd/Issues/blob/main/GLM-5-FP8-MI355X-SGLANG-ERROR.md",
    ),
    Row(
        name="GLM-5.1-FP8, 8 x H200, vLLM 0.19, eager",
        config="glm-5.1",
        engine="vllm",
        fraction=0.9,
        is_eager=True,
        kv_dtype=BF16,
        weights_gib=89.39,
        pool_gib=32.06,
        tokens=343_744,
        source="public log, address not confirmed",
    ),
    Row(
        name="GLM-5.1-FP8, 8 x H200, vLLM later, eager",
        config="glm-5.1",
        engine="vllm",
        fraction=0.9,
        is_eager=True,
        kv_dtype=BF16,
        weights_gib=89.39,
        pool_gib=34.86,
        tokens=373_696,
        source="public log, address not confirmed",
    ),
    Row(
        name="Kimi-K2-Thinking, 8 x H200, vLLM 2025-11",
        config="kimi-k2-thinking",
        engine="vllm",
        fraction=0.9,
        kv_dtype=BF16,
        pool_gib=46.80,
        tokens=715_072,
        source="https://github.com/vllm-project/recipes/blob/main/moonshotai/Kimi-K2-Think.md",
    ),
    Row(
        name="Kimi-K2.5, 288 GB GPUs, vLLM",
        config="kimi-k2.5",
        engine="vllm",
        gpu="mi355x",
        kv_dtype=BF16,
        pool_gib=163.59,
        tokens=2_499_584,
        source="https://github.com/MoonshotAI/Kimi-K2.5/issues/34",
    ),
    Row(
        name="Kimi-K2.5, 8 x H100, vLLM 0.15",
        config="kimi-k2.5",
        engine="vllm",
        gpu="h100",
        weights_gib=72.02,
        source="public log, address not confirmed",
    ),
    Row(
        name="GLM-5.2-FP8, 8 x H200, vLLM 0.26, KV offload",
        config="glm-5.2",
        engine="vllm",
        kv_dtype=FP8,
        kv_layout=KvLayout.PACKED,
        # 1,104,691,200 B were written for 2,560 tokens of 8 ranks
        bytes_per_token=1_104_691_200 / 2_560 / 8,
        source="https://github.com/vllm-project/recipes/pull/754",
    ),
    Row(
        name="GLM-5.x-FP8, 8 x RTX PRO 6000, SGLang",
        config="glm-5.2",
        engine="sglang",
        gpu="rtx-pro-6000",
        weights_gib=89.44,
        excluded="its pool of 4,096 tokens is printed to 0.01 GiB, which is 5 % of it",
        source="public log, address not confirmed",
    ),
    Row(
        name="Qwen3-235B-A22B-FP8, 4 x H100, SGLang 2025-07",
        config="qwen3-235b-a22b-fp8",
        engine="sglang",
        gpu="h100",
        tp=4,
        fraction=0.93,
        kv_dtype=BF16,
        pool_gib=16.46,
        tokens=367_404,
        source="https://github.com/vllm-project/vllm/issues/21348",
    ),
    Row(
        name="Qwen3-235B-A22B-FP8, 4 x H100, vLLM 2025-07",
        config="qwen3-235b-a22b-fp8",
        engine="vllm",
        gpu="h100",
        tp=4,
        fraction=0.9,
        kv_dtype=BF16,
        pool_gib=8.11,
        tokens=178_880,
        bytes_tolerance=1.5,  # the pool was printed before it was cut to whole blocks
        source="https://github.com/vllm-project/vllm/issues/21348",
    ),
    Row(
        name="DeepSeek-R1, 8 x 94.6 GiB, vLLM fork",
        config="deepseek-v3",
        engine="vllm",
        weights_gib=79.41,
        source="https://github.com/HabanaAI/vllm-fork/issues/809",
    ),
    Row(
        name="GLM-5.3 W4A8 g128, 8 x H20-3e, vLLM, EP",
        config="glm-5.3",
        engine="vllm",
        ep=8,
        kv_dtype=FP8,
        kv_layout=KvLayout.PACKED,
        scheme=Scheme(experts="int4", rest="fp8", group_size=128),
        with_mtp=True,
        excluded="states about 1.26 million tokens and no pool",
        source="https://huggingface.co/gpustack/GLM-5.3-W4A8",
    ),
    Row(
        name="GLM-5.2-NVFP4, RTX PRO 6000, SGLang 2026-07",
        config="glm-5",
        engine="sglang",
        gpu="rtx-pro-6000",
        kv_dtype=FP8,
        kv_layout=KvLayout.RAW,
        pool_gib=23.91,
        tokens=464_768,
        excluded="layout inferred; an older build with index keys on all layers, so GLM-5's config stands in",
        source="https://github.com/SemiAnalysisAI/InferenceX/pull/2335",
    ),
    Row(
        name="GLM-5.x, SGLang 2026-07, 106 GiB visible",
        config="glm-5",
        engine="sglang",
        kv_dtype=FP8,
        kv_layout=KvLayout.PACKED,
        pool_gib=7.51,
        tokens=131_072,
        excluded="layout inferred, version not stated; an older build with index keys on all layers",
        source="public log, address not confirmed",
    ),
    Row(
        name="DeepSeek-V3, 8 x H200, SGLang 2025-02",
        config="deepseek-v3",
        engine="sglang",
        excluded="logs what is free after loading only: it is where the 137.4 GiB before loading come from",
        source="https://github.com/sgl-project/sglang/issues/3416",
    ),
    Row(
        name="Kimi-K3, 16 GPUs, vLLM fork",
        config="kimi-k2",
        engine="vllm",
        excluded="hybrid attention and latent experts: not a family here, and its placement is not known",
        source="public log, address not confirmed",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One comparison; ``excluded`` where it does not count."""

    row: str
    what: str
    planned: float
    measured: float
    tolerance: float
    excluded: str

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
    """Weights, bytes per token, and tokens in the pool that was logged."""
    plan = plan_of(row)
    stage = plan.stages[0]
    cell = float(stage.cell.num_bytes)

    def figure(what: str, planned: float, measured: float, tolerance: float) -> Figure:
        excluded = row.excluded if what != "weights" else ""
        return Figure(
            row=row.name, what=what, planned=planned, measured=measured, tolerance=tolerance, excluded=excluded
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
    lines = ["| server | figure | planned | measured | difference |", "|---|---|---|---|---|"]
    for row in ROWS:
        found = list(figures(row))
        for one in found:
            digits = 2 if one.what in ("weights", "pool") else 0
            unit = {"weights": "GiB", "bytes": "B a token", "tokens": "tokens", "pool": "GiB"}[one.what]
            note = " (not counted)" if one.excluded else ""
            lines.append(
                f"| {one.row} | {one.what} | {one.planned:,.{digits}f} {unit} | {one.measured:,.{digits}f} | "
                f"{one.percent:+.2f} %{note} |"
            )
        if row.excluded:
            lines.append(f"| {row.name} | | | | {row.excluded} |")
    return lines


if __name__ == "__main__":
    sys.stdout.write("\n".join(table()) + "\n")
