#!/usr/bin/env python
"""What evaluations of their usual sizes can show of a drop, and simulated sample logs to show `quantkit gate` with.

No model was evaluated: 4 % of the answers flip, a little more of them for the worse.
"""

import argparse
import json
import math
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from quantkit.gate.paired import largest_passing_drop

FLIP_RATE = 0.04
CONFIDENCE = 0.95
MARGINS = (0.8, 1.0)  # points: claimed of INT4 experts, and of FP8 KV caches
QUESTIONS = {
    "GSM8K": 1319,
    "ARC-Challenge": 1172,
    "ARC-Easy": 2376,
    "MMLU": 14042,
    "MMLU-Pro": 12032,
    "BFCL, about": 2500,
    "K2 Vendor Verifier, about": 2000,
}
# task: metric, questions, right before, lost, gained
SIMULATED = {
    "arc_challenge": ("acc_norm", 1172, 0.70, 25, 22),
    "gsm8k": ("exact_match", 1319, 0.95, 28, 25),
    "mmlu": ("acc", 14042, 0.87, 295, 267),
    "mmlu_pro": ("exact_match", 12032, 0.80, 255, 226),
}


def table() -> list[str]:
    """Lines of Markdown."""
    shown = [f"largest observed drop that shows {margin:g}" for margin in MARGINS]
    lines = [f"| {' | '.join(('evaluation', 'questions', 'standard error', *shown))} |", "|---|---:|---:|---:|---:|"]
    for name, num_questions in QUESTIONS.items():
        error = 100 * math.sqrt(FLIP_RATE / num_questions)
        cells = [
            _points(100 * largest_passing_drop(FLIP_RATE, num_questions, margin=margin / 100, confidence=CONFIDENCE))
            for margin in MARGINS
        ]
        lines.append(f"| {name} | {num_questions:,} | {error:.2f} | {' | '.join(cells)} |")
    return lines


def _points(drop: float) -> str:
    return f"{drop:.2f}" if drop >= 0 else f"none: a gain of {-drop:.2f}"


def write_logs(directory: Path) -> None:
    """Two runs, ``fp8`` and ``int4``, as lm_eval writes them."""
    for task, (metric, num_questions, share, num_lost, num_gained) in SIMULATED.items():
        generator = random.Random(task)
        before = [generator.random() < share for _ in range(num_questions)]
        right, wrong = ([index for index, one in enumerate(before) if one is which] for which in (True, False))
        flips = {*generator.sample(right, num_lost), *generator.sample(wrong, num_gained)}
        after = [one != (index in flips) for index, one in enumerate(before)]
        for side, scores in (("fp8", before), ("int4", after)):
            path = directory / side / f"samples_{task}_2026-05-01T10-20-30.123456.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [
                {"doc_id": index, "filter": "none", "doc_hash": f"{task} {index}", metric: float(one)}
                for index, one in enumerate(scores)
            ]
            path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print("\n".join(table()))
