"""`quantkit` in processes that are forked from one which has imported it: a new one imports for most of its time.

Each is a process of its own, with its own arguments, environment, folder, streams and exit code. What a test wants of
an interpreter's start (what is imported, by which settings) it asks of a new one.
"""

import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.line_process import LineProcess


def run_forked(arguments: list[str], folder: Path, environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """`quantkit` with these arguments, in that folder."""
    with tempfile.TemporaryDirectory() as streams:
        task = {"arguments": arguments, "folder": str(folder), "environment": environment, "streams": streams}
        returncode = int(_server().ask(json.dumps(task)))
        stdout, stderr = (Path(streams, name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(arguments, returncode, stdout, stderr)


@functools.cache
def _server() -> "LineProcess":
    """Takes tasks and gives exit codes."""
    from tests.line_process import LineProcess  # this file is a program, too, which knows no other of the tests

    return LineProcess(__file__)


def _is_child() -> bool:
    """Whether this is the process of one command, forked here; else all tasks are done."""
    for line in sys.stdin:
        task = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(task)
            return True
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()
    return False


def _become(task: dict[str, object]) -> None:
    """Take over what a new process would be given."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, sys.stdin.fileno())
    for stream in (sys.stdout, sys.stderr):
        name = Path(str(task["streams"]), stream.name.strip("<>"))
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream.fileno())
    os.chdir(str(task["folder"]))
    os.environ.clear()
    os.environ.update(task["environment"])  # type: ignore[call-overload]
    sys.argv[1:] = task["arguments"]  # type: ignore[call-overload]


if __name__ == "__main__":
    sys.path[0] = ""  # as of a program that is given by -c
    for module in ("quantkit.cli.converting", "quantkit.numerics.fused_cpu", "quantkit.verify.verify"):
        importlib.import_module(module)
    from quantkit.cli.app import main

    if _is_child():
        main()
