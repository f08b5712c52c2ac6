#!/usr/bin/env python
"""Ask the engines' own packing code, in unpacked wheels, for bytes that the layouts must give: random codes, no GPU.

    scripts/compare_layouts.py SGLANG_DIRECTORY VLLM_DIRECTORY

Each directory holds the unpacked package (``sglang/`` or ``vllm/``). Only the functions named here are run, out of
their files: neither engine is imported.
"""

import argparse
import ast
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from quantkit.layouts import LAYOUTS, classic
from quantkit.numerics.packing import Int4Words, pack_int4

SGLANG_FILE = "sglang/srt/layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a8_fp8_moe.py"
VLLM_FILE = "vllm/model_executor/layers/quantization/utils/quant_utils.py"
NUM_CASES = 200


def functions_of(path: Path, *names: str) -> dict[str, Any]:
    """Functions of a file, without what the file imports."""
    tree = ast.parse(path.read_text())
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names}
    if set(found) != set(names):
        raise SystemExit(f"{path} has no {', '.join(set(names) - set(found))}")
    scope: dict[str, Any] = {"torch": torch, "numpy": np, "get_pack_factor": lambda bits: 32 // bits}
    exec(compile(ast.Module(body=list(found.values()), type_ignores=[]), str(path), "exec"), scope)
    return scope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sglang", type=Path)
    parser.add_argument("vllm", type=Path)
    asked = parser.parse_args()
    sglang = functions_of(asked.sglang / SGLANG_FILE, "_unpack_repack_int32_to_cutlass_int8")
    vllm = functions_of(asked.vllm / VLLM_FILE, "pack_rows", "pack_cols", "gptq_pack", "awq_pack")
    random = np.random.default_rng(0)
    for case in range(NUM_CASES):
        rows, cols = 8 * int(random.integers(1, 9)), 32 * int(random.integers(1, 9))
        codes = random.integers(-8, 8, (rows, cols)).astype(np.int8)
        packed, scale = pack_int4(codes), np.ones((rows, cols // 32), np.uint16)
        theirs = sglang["_unpack_repack_int32_to_cutlass_int8"](torch.from_numpy(packed)[None], 4)[0].numpy()
        ours = LAYOUTS["w4afp8"].from_words(Int4Words(packed, scale))["packed"]
        unsigned = torch.from_numpy(codes.T.astype(np.int32) + 8)
        gptq = classic.gptq_words(vllm["gptq_pack"](unsigned, 4, cols, rows).numpy())
        awq = classic.awq_words(vllm["awq_pack"](unsigned, 4, cols, rows).numpy(), rows)
        for name, first, second in (("w4afp8", ours, theirs), ("gptq", gptq, packed), ("awq", awq, packed)):
            if not np.array_equal(first, second):
                raise SystemExit(f"case {case}, {name}, {rows} x {cols}: differs")
    print(f"{NUM_CASES} matrices: w4afp8 as SGLang repacks, gptq and awq as vLLM packs them")


if __name__ == "__main__":
    main()
