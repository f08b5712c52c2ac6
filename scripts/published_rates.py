#!/usr/bin/env python
"""Published decode rates of GLM-5.2 on 8 x H200 (TP8), beside what the bytes of the experts alone would make of them.

The rates are Cloudflare's, in tokens a second by requests at once; nothing of them was measured here.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from quantkit.memory.gpus import gpu_named
from quantkit.memory.resolve import recipe_model
from quantkit.memory.scheme import Scheme
from quantkit.memory.serving import MemoryRequest
from quantkit.serving.estimate import estimate, rate_by_bytes

FP8 = {1: 60, 8: 425, 16: 683, 32: 994, 64: 1672}
INT4 = {1: 92, 8: 513, 16: 825, 32: 1267, 64: 1933}
_COLUMNS = ("requests", "FP8, published", "INT4 g32 if only the experts' bytes shrank", "INT4, published")


def table() -> list[str]:
    """Lines of Markdown."""
    scheme = Scheme(experts="int4", rest="bf16", group_size=32)
    found = estimate(recipe_model("glm-5.2"), MemoryRequest(gpu=gpu_named("h200"), scheme=scheme), FP8)
    lines = [f"| {' | '.join(_COLUMNS)} |", "|" + "---:|" * len(_COLUMNS)]
    for one in found.steps:
        count = one.concurrency
        ideal = rate_by_bytes(FP8[count], count, one.saved_by_experts)
        cells = (f"{count}", f"{FP8[count]:,}", f"{ideal:,.0f} ({_gain(ideal, count)})")
        lines.append(f"| {' | '.join(cells)} | {INT4[count]:,} ({_gain(INT4[count], count)}) |")
    return lines


def _gain(rate: float, count: int) -> str:
    return f"{100 * (rate / FP8[count] - 1):+.0f} %"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print("\n".join(table()))
