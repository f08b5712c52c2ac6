"""What the suite asks of a process beside it."""

import pytest

from tests.line_process import LineProcess

PROGRAM = """
import sys
for line in sys.stdin:
    if line == "die\\n":
        sys.exit(3)
    print(line.strip()[::-1], flush=True)
"""


def test_one_that_died_is_named_and_the_next_task_starts_another(tmp_path):
    program = tmp_path / "turn.py"
    program.write_text(PROGRAM)
    turned = LineProcess(str(program))
    assert [turned.ask("abc"), turned.ask("de")] == ["cba", "ed"]
    with pytest.raises(AssertionError, match=r"turn\.py ended with 3"):
        turned.ask("die")
    assert turned.ask("fg") == "gf"
