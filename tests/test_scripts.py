"""Every script runs as it is printed: from any directory, whether or not quantkit is installed where Python is."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
EXECUTABLE = [path for path in sorted(SCRIPTS.glob("*.py")) if os.access(path, os.X_OK)]
HERE = "sys.path.insert(0, str(Path(__file__).resolve().parents[1]"


def test_what_can_be_run_is_executable_and_finds_the_clone():
    for path in sorted(SCRIPTS.glob("*.py")):
        text = path.read_text()
        is_run = '__name__ == "__main__"' in text
        assert is_run == (path in EXECUTABLE) == text.startswith("#!/usr/bin/env python\n"), path.name
        ours = [line for line in text.splitlines() if line.startswith(("from quantkit", "from scripts", "from tests"))]
        assert not is_run or not ours or HERE in text.partition(ours[0])[0], path.name


@pytest.mark.slow
@pytest.mark.parametrize("path", EXECUTABLE, ids=lambda path: path.name)
def test_it_says_what_it_does_from_another_directory(path, tmp_path):
    """Without the links of an editable install, which Python reads in its own directory of packages alone."""
    packages = Path(find_spec("numpy").origin).parent.parent
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-S", path, "--help"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: ")
