"""The checker of flags finds what an engine does not have; the engines themselves are not here."""

from pathlib import Path

import pytest

from quantkit.serving.flags import Server, flag
from scripts.check_flags import problems, router_definitions, sglang_definitions

SGLANG = {
    "srt/arg_groups/choices.py": 'KINDS = ["one", "two"]\n',
    "srt/arg_groups/fields/all.py": """
from typing import Literal
class Fields:
    plain: A[int, "help"] = 1
    old_one: A[bool, "Deprecated. Use another."] = False
    kind: A[str, Arg(help="of it", choices=KINDS, aliases=["--sort"])] = "one"
    mode: A[Literal["a", "b"], "help"] = "a"
    hidden: A[int, Arg(help="", no_cli=True)] = 1
    named: A[str, "Builtins: X, Y. Or any other."] = "X"
""",
    "srt/server_args.py": """
def add(parser):
    parser.add_argument("--retired", action=DeprecatedStoreTrueAction, help="x")
    parser.add_argument("--tool-call-parser", type=str)
    parser.add_argument("--reasoning-parser", type=str)
""",
    "srt/function_call/parser_names.py": 'TOOL_CALL_PARSER_NAMES = ["glm47"]\n',
    "srt/parser/reasoning_parser_names.py": 'REASONING_PARSER_NAMES = ["glm45"]\n',
}


@pytest.fixture
def wheel(tmp_path) -> Path:
    for name, text in SGLANG.items():
        path = tmp_path / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--plain", "7"), None),
        (("--nothing",), "--nothing: there is no such flag"),
        (("--hidden", "1"), "--hidden: there is no such flag"),
        (("--old-one",), "--old-one: is deprecated"),
        (("--retired",), "--retired: is deprecated"),
        (("--kind", "two"), None),
        (("--sort", "three"), "--sort three: is no choice"),
        (("--mode", "c"), "--mode c: is no choice"),
        (("--named", "Z"), "--named Z: is no choice"),
        (("--tool-call-parser", "auto"), None),
        (("--tool-call-parser", "glm46"), "--tool-call-parser glm46: is no choice"),
    ],
)
def test_what_the_source_does_not_have_is_found(words, problem, wheel):
    server = Server(name="x", role="both", host="x", program=("x",), flags=(flag(*words, why="y"),))
    assert list(problems(server, sglang_definitions(wheel))) == ([] if problem is None else [problem])


def test_prefixes_of_the_router_are_empty(tmp_path):
    path = tmp_path / "sglang_router" / "router_args.py"
    path.parent.mkdir()
    path.write_text('def add(group, prefix):\n    group.add_argument(f"--{prefix}decode", nargs=1, action="append")\n')
    assert list(router_definitions(tmp_path)) == ["--decode"]
