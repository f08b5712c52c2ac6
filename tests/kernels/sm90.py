"""Compile kernels for sm_90 where there is no GPU, and read what the assembler made of them.

A process of its own, since the tests' own may have chosen the interpreter. `cuobjdump` comes with Triton.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Compiled:
    """``stack_bytes``: of spilled registers. ``num_fused``: multiplications fused with additions. ``sass``: lines."""

    num_registers: int
    stack_bytes: int
    num_fused: int
    ptx: str
    sass: list[str]


def compile_kernel(
    kernel: str, signature: dict[str, str], constants: dict[str, Any], cache: Path, **options: Any
) -> Compiled:
    """``kernel``: module and name with a colon. ``signature``: types by name; constants need none."""
    task = {
        "kernel": kernel,
        "signature": signature | dict.fromkeys(constants, "constexpr"),
        "constants": constants,
        "options": options,
    }
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    ran = subprocess.run(
        [sys.executable, __file__], input=json.dumps(task), env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return Compiled(**json.loads(ran.stdout))


def _main() -> None:
    import importlib
    import tempfile

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    task = json.loads(sys.stdin.read())
    module, name = task["kernel"].split(":")
    constants = {key: tuple(value) if isinstance(value, list) else value for key, value in task["constants"].items()}
    source = ASTSource(
        fn=getattr(importlib.import_module(module), name), signature=task["signature"], constexprs=constants
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=task["options"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        read = [
            subprocess.run([tool, option, cubin.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        ]
    usage = dict(re.findall(r"(REG|STACK):(\d+)", read[0]))
    ptx = compiled.asm["ptx"]
    document = {
        "num_registers": int(usage["REG"]),
        "stack_bytes": int(usage["STACK"]),
        "num_fused": len(re.findall(r"\bfma\.", ptx)),
        "ptx": ptx,
        "sass": re.findall(r"/\*[0-9a-f]{4}\*/\s+(.*?);", read[1]),
    }
    sys.stdout.write(json.dumps(document))


if __name__ == "__main__":
    _main()
