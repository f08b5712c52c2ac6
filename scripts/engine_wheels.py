#!/usr/bin/env python
"""Runs the tests of the guard's plugins on the engines' own classes: SGLang 0.5.23's, vLLM 0.33.0's, or both.

Give folders in which the wheels were unpacked, and those of what vLLM imports besides. Nothing is fetched or built, and
only what is not compiled is loaded of an engine. Each has a process of its own: what SGLang imports is a stand-in.

    pip download --no-deps -d wheels sglang==0.5.23 vllm==0.33.0
    for wheel in wheels/*.whl; do unzip -q $wheel -d engines; done
    pip install --no-deps --target engines/needs $(scripts/engine_wheels.py --needs)
    scripts/engine_wheels.py engines engines/needs
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = "tests/kv_guard/engines"
# what the modules import that are loaded of vLLM, and what these import, beyond scripts/constraints.txt
NEEDS = (
    *("aiohappyeyeballs", "aiohttp", "aiosignal", "apache-tvm-ffi", "cachetools", "cbor2", "cloudpickle", "einops"),
    *("fastapi", "frozenlist", "llguidance", "msgspec", "multidict", "openai", "openai-harmony", "opentelemetry-api"),
    *("partial-json-parser", "prometheus_client", "propcache", "pybase64", "pyzmq", "sniffio", "starlette", "uvloop"),
    *("xgrammar", "yarl"),
)


def runs_of(folders: Sequence[Path]) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Variables and pytest's arguments for each engine that lies in a folder."""
    paths = [folder.resolve() for folder in folders]
    for path in paths:
        if (path / "sglang").is_dir():
            yield {"QUANTKIT_SGLANG": str(path)}, [f"{TESTS}/test_sglang_wheel.py"]
        if (path / "vllm").is_dir():
            in_order = [path, *(other for other in paths if other != path)]
            yield {"QUANTKIT_VLLM": os.pathsep.join(map(str, in_order))}, [TESTS, "-k", "wheel and not sglang"]


def main() -> int:
    """Parse and run; 1 where tests of an engine failed, or none ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*", metavar="FOLDER")
    parser.add_argument("--needs", action="store_true", help="print what vLLM's modules import, and run nothing")
    given = parser.parse_args()
    if given.needs:
        print(" ".join(NEEDS))
        return 0
    runs = list(runs_of(given.folders))
    if not runs:
        parser.error("no folder has an unpacked wheel of SGLang or vLLM")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])])
    others = {name: value for name, value in os.environ.items() if not name.startswith("QUANTKIT_")}
    codes = []
    for variables, arguments in runs:
        command = [sys.executable, "-m", "pytest", "-q", *arguments]
        environment = others | variables | {"PYTHONPATH": paths}
        codes.append(subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
