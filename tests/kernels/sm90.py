"""Compile kernels for sm_90 where there is no GPU, and read what the assembler made of them.

A process of its own, since the tests' own may have chosen the interpreter; one for all kernels, since importing Triton
takes longer than most of them. `cuobjdump` comes with Triton.
"""

import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.line_process import LineProcess


@dataclass(frozen=True)
class Compiled:
    """``stack_bytes``: of spilled registers. ``num_fused``: multiplications fused with additions.

    ``sass``: instructions with their addresses; ``loop``: those of the longest backward branch.
    """

    num_registers: int
    stack_bytes: int
    num_fused: int
    ptx: str
    sass: list[tuple[int, str]]

    def per_weight(self, num_weights: int, num_warps: int = 4) -> float:
        """Instructions of the main loop for each weight of one of its steps."""
        return len(self.loop) * 32 * num_warps / num_weights

    @property
    def num_exchanges(self) -> int:
        """Of the main loop: stores to shared memory and shuffles, by which values come to other lanes."""
        return sum(re.match(r"(?:@!?U?P\w+ )?(?:STS|STSM|SHFL)", text) is not None for text in self.loop)

    @property
    def loop(self) -> list[str]:
        """Instructions of the main loop."""
        places = {address: index for index, (address, _) in enumerate(self.sass)}
        longest = (0, 0)
        for index, (_, text) in enumerate(self.sass):
            branch = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
            begin = places.get(int(branch[1], 16)) if branch else None
            if begin is not None and begin < index and index - begin > longest[1] - longest[0]:
                longest = (begin, index)
        return [text for _, text in self.sass[longest[0] : longest[1] + 1]]


def compile_kernel(
    kernel: str, signature: dict[str, str], constants: dict[str, Any], cache: Path, **options: Any
) -> Compiled:
    """``kernel``: module and name with a colon. ``signature``: types by name; constants need none.

    Pointers are taken to be aligned to 16 bytes, as torch's are.
    """
    task = {
        "kernel": kernel,
        "signature": signature | dict.fromkeys(constants, "constexpr"),
        "constants": constants,
        "options": options,
        "cache": str(cache),
    }
    return Compiled(**json.loads(_compiler().ask(json.dumps(task))))


@functools.cache
def _compiler() -> "LineProcess":
    """Takes tasks and gives documents."""
    from tests.line_process import LineProcess  # this file is a program, too, which knows no other of the tests

    return LineProcess(__file__, {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"})


def _main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what Triton prints is no answer
    for line in sys.stdin:
        answers.write(json.dumps(_compile(json.loads(line))) + "\n")
        answers.flush()


def _compile(task: dict[str, Any]) -> dict[str, Any]:
    """The fields of `Compiled`."""
    import importlib
    import tempfile

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    os.environ["TRITON_CACHE_DIR"] = task["cache"]
    module, name = task["kernel"].split(":")
    constants = {key: tuple(value) if isinstance(value, list) else value for key, value in task["constants"].items()}
    function = getattr(importlib.import_module(module), name)
    signature = {key: task["signature"][key] for key in function.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]] for index, kind in enumerate(signature.values()) if kind.startswith("*")
    }
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
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
    return {
        "num_registers": int(usage["REG"]),
        "stack_bytes": int(usage["STACK"]),
        "num_fused": len(re.findall(r"\bfma\.", ptx)),
        "ptx": ptx,
        "sass": [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", read[1])],
    }


if __name__ == "__main__":
    _main()
