"""``--summary``: Markdown of every document and every failure, in a safe file, whatever names hold."""

import os
import re
import signal
import subprocess
import sys

import pytest
from markdown_it import MarkdownIt

from quantkit.cli.markdown import MOST_LINES, bullets, code, escaped, table
from quantkit.cli.page_file import check_page
from quantkit.cli.summary import summary
from quantkit.cli.summary_file import asked_for
from quantkit.errors import UsageError
from tests.cli.test_commands import document, run

HOSTILE = (
    "a|b",
    "a\\|b",
    "`a`",
    "``` a ```",
    "<script>alert(1)</script>",
    "</code></td></table>",
    "<!-- ",
    "&lt;b&gt; &amp;",
    "**a** _b_ __c__ ~~d~~",
    "[a](https://a.example)",
    "![a](https://a.example/b.png)",
    "https://a.example www.a.example mailto:a@b.example",
    "@everyone #1 $x$ :a:",
    "# a",
    "- a",
    "+ a",
    "---",
    "===",
    "1. a",
    "12) a",
    "a\nb\r\n\n## c",
    "a\x1b[31mb\x07\u202ec\u2028d",
    "\\",
    "a\\",
    "a_b _c_",
    "![",
    "<https://a.example>",
    "\ud800",
)


def rendered(text):
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(text)


def shown(text):
    """What is left of a rendering without the tags that are ours."""
    import html

    return html.unescape(
        re.sub(r"</?(?:code|p|h2|table|thead|tbody|tr|t[hd]|ul|li|strong)(?: style=\"[\w:-]*\")?>", "", text)
    )


def one_line(text):
    """How a name is spelled on a line of its own."""
    from quantkit.cli.render import printable

    return " ".join(printable(text).split())


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_show_as_they_are(name):
    lines = [*table(["name", "number"], [[code(name), escaped(name)]]), *bullets("Names", [name, "and"])]
    made = rendered("\n".join(lines))
    tags = set(re.findall(r"<(/?\w+)", made))
    ours = {"table", "thead", "tbody", "tr", "th", "td", "code", "p", "ul", "li"}
    assert tags == ours | {f"/{tag}" for tag in ours}
    assert made.count("<td") == 2
    assert made.count("<li>") == 2
    texts = re.findall(r"<code>(.*?)</code>|<td style=\"[^\"]*\">([^<]*)</td>|<li>([^<]*)</li>", made, re.DOTALL)
    assert [shown("".join(text)) for text in texts] == [one_line(name)] * 3 + ["and"]


def test_nothing_grows_without_end():
    assert len(escaped("x" * 100_000)) < 1000
    assert len(table(["a"], [["x"]] * 1000)) < MOST_LINES + 10
    assert f"({1000 - MOST_LINES} more)" in bullets("Notes", ["x"] * 1000)


def test_every_command_appends_what_its_document_says(tiny_checkpoint, tmp_path):
    source, path = tiny_checkpoint(mtp=True).directory, tmp_path / "s.md"
    commands = [
        ("plan", source),
        ("convert", source, "-o", tmp_path / "out", "-q"),
        ("verify", tmp_path / "out", "--source", source, "-q"),
        ("memory-plan", source, "--to", "int4", "--tp", "1"),
    ]
    expected = []
    for command in commands:
        result = run(*command, "--json", "--summary", path)
        assert result.returncode == 0, result.stderr
        expected.append(summary(document(result, command[0])))
    assert path.read_text() == "\n".join(expected)
    made = path.read_text()
    assert re.findall(r"^## .*", made, re.MULTILINE) == [f"## quantkit {command[0]}: ok" for command in commands]
    for words in ("routed&#95;expert", "routed_expert", "disk needed", "relative error", "every value", "**fits**"):
        assert (words in made) == ("&#95;" not in words), words
    assert rendered(made).count("<table>") == 6
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    "arguments",
    [
        ["glm-5.2", "--tp", "8"],
        ["glm-5.2", "--to", "int4", "--tp", "8", "--pp", "2"],
        ["glm-5.2", "--compare", "fp8,int4"],
        ["--tp", "8"],
    ],
)
def test_every_kind_of_memory_plan_has_a_summary(arguments, tmp_path):
    result = run("memory-plan", *arguments, "--json", "--summary", "s.md", cwd=tmp_path)
    assert (tmp_path / "s.md").read_text() == summary(document(result, "memory-plan"))
    assert "<table>" in rendered((tmp_path / "s.md").read_text())


def test_failures_have_a_summary_with_the_remedy(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(write=False)
    source.remove("model.layers.1.mlp.experts.2.up_proj.weight_scale_inv")
    source.write()
    good = tiny_checkpoint("good").directory
    for number, (arguments, code_) in enumerate(
        [
            (("plan", source.directory), 3),
            (("convert", source.directory, "-o", tmp_path / "out"), 3),
            (("convert", good, "-o", good), 2),
            (("plan", good, "--bogus"), 2),
            (("verify", good), 4),
            (("memory-plan", "./nowhere"), 3),
        ]
    ):
        path = tmp_path / f"{number}.md"
        result = run(*arguments, f"--summary={path}", "--json")
        assert result.returncode == code_
        failure = document(result, "error")
        assert path.read_text() == summary(failure)
        assert f"## quantkit {arguments[0]}: error" in path.read_text()
        assert escaped(failure["error"]["message"]) in path.read_text()
        assert f"**Remedy**: {escaped(failure['error']['remedy'])}" in path.read_text()


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_failed_verification_and_a_plan_that_does_not_fit_have_one_summary(options, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    assert run("convert", source, "-o", tmp_path / "out", "-q").returncode == 0
    (tmp_path / "out" / "a|b.safetensors").write_bytes(b"x")
    result = run("verify", tmp_path / "out", "-q", "--summary", tmp_path / "s.md", *options)
    assert result.returncode == 4
    assert ("quantkit: " in result.stderr) == (options == [])
    made = (tmp_path / "s.md").read_text()
    assert made.count("## ") == 1
    assert "## quantkit verify: failed" in made
    assert "a&#124;b.safetensors" in made
    assert "is not named by the manifest" in made
    result = run("memory-plan", "glm-5.2", "--tp", "2", "--summary", tmp_path / "m.md", *options)
    assert result.returncode == 5
    made = (tmp_path / "m.md").read_text()
    assert made.startswith("## quantkit memory-plan: failed\n\n**does not fit**: ")
    assert made.count("## ") == 1
    assert "What would help" in made


def test_a_rank_and_a_smoke_run_have_a_summary(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    rank = run(
        "convert", source, "-o", tmp_path / "a", "--rank", "0", "--world-size", "2", "--summary", "r.md", cwd=tmp_path
    )
    assert rank.returncode == 0, rank.stderr
    assert "Rank 0 of 2: 1 shards" in (tmp_path / "r.md").read_text()
    result = run(
        "convert", source, "-o", tmp_path / "b", "--limit-shards", "1", "--summary", "p.md", "--json", cwd=tmp_path
    )
    assert document(result, "convert")["limits"]["num_shards"] == 1
    assert "- partial: 1 of 2 shards" in (tmp_path / "p.md").read_text()
    planned = document(run("convert", source, "--layers", "1-1", "--dry-run", "--json"), "plan")
    assert planned["limits"]["layers"] == [1, 1]
    assert document(run("plan", source, "--json"), "plan")["limits"] is None


def test_what_is_there_stays_and_only_regular_files_are_written(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    github = tmp_path / "step_summary_2c1b"
    github.write_text("# Before")
    assert run("plan", source, "--summary", github).returncode == 0
    assert github.read_text().startswith("# Before\n## quantkit plan: ok\n")

    victim = tmp_path / "victim.md"
    victim.write_text("kept")
    (tmp_path / "link.md").symlink_to(victim)
    (tmp_path / "dangling.md").symlink_to(tmp_path / "new.md")
    (tmp_path / "directory.md").mkdir()
    os.mkfifo(tmp_path / "fifo.md")
    weights = source / "model-00001-of-00002.safetensors"
    before = weights.read_bytes()
    names = ["link.md", "dangling.md", "directory.md", "fifo.md", "no/where.md", f"{'x' * 300}.md"]
    for path in [*(tmp_path / name for name in names), "/dev/null", weights, source / "config.json"]:
        here = {one.name for one in tmp_path.iterdir()}
        result = run("convert", source, "-o", tmp_path / "out", "--summary", path)
        assert result.returncode == 2, path
        assert len(result.stderr.splitlines()) == 1, result.stderr
        assert "--summary" in result.stderr
        assert {one.name for one in tmp_path.iterdir()} == here
    assert victim.read_text() == "kept"
    assert weights.read_bytes() == before


def test_nothing_is_written_into_a_checkpoint(tiny_checkpoint, tmp_path):
    """Neither what a command found nor that it was refused; by whatever link."""
    source = tiny_checkpoint().directory
    (source / "folder").mkdir()
    (tmp_path / "link").symlink_to(source)
    before = {path: path.stat().st_mtime_ns for path in source.rglob("*")}
    for path in (source / "s.md", source / "folder" / "s.md", tmp_path / "link" / "s.md"):
        result = run("plan", source, "--summary", path)
        assert (result.returncode, "lies in the source" in result.stderr) == (2, True), result.stderr
        with pytest.raises(UsageError, match=r"--report .* lies in the source"):
            check_page(path.with_suffix(".html"), is_ours="x", option="--report")
    assert {path: path.stat().st_mtime_ns for path in source.rglob("*")} == before


def test_a_summary_that_cannot_be_written_does_not_hide_the_error(tmp_path):
    (tmp_path / "s.md").mkdir()
    result = run("plan", "./nowhere", "--summary", "s.md", cwd=tmp_path)
    assert result.returncode == 2  # refused before the source is looked at
    result = run("plan", "--bogus", "--summary", "s.md", cwd=tmp_path)
    assert result.returncode == 2
    first, second = result.stderr.splitlines()
    assert "--bogus" in first
    assert second.startswith("quantkit: no summary: --summary s.md is no regular file")


def test_commands_without_the_option_write_none(tmp_path):
    assert run("recipes", "--summary", "s.md", cwd=tmp_path).returncode == 2
    assert not list(tmp_path.iterdir())
    assert asked_for("plan", ["plan", "--summary"]) is None
    assert asked_for("plan", ["plan", "--summary", "--json"]) is None
    assert asked_for("inspect", ["inspect", "--summary", "a"]) is None


@pytest.mark.parametrize(("number", "returncode"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_and_a_bug_have_a_summary(number, returncode, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    program = (
        "import os, sys\n"
        "from quantkit.convert import convert\n"
        "from quantkit.cli.app import main\n"
        "def complete(*arguments):\n"
        "    if os.environ['SIGNAL'] == 'bug':\n"
        "        raise RuntimeError('a|b')\n"
        "    os.kill(os.getpid(), int(os.environ['SIGNAL']))\n"
        "convert.complete = complete\n"
        "main()\n"
    )

    def ended(name):
        command = [
            sys.executable,
            "-c",
            program,
            "convert",
            source,
            "-o",
            tmp_path / name,
            "--summary",
            tmp_path / f"{name}.md",
        ]
        environment = {**os.environ, "SIGNAL": "bug" if name == "bug" else str(int(number))}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert ended("stopped").returncode == returncode
    made = (tmp_path / "stopped.md").read_text()
    assert "**Interrupted**: interrupted" in made
    assert "2 of 2 shards are done and kept" in made
    assert "the same command goes on from there" in made
    result = ended("bug")
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "**RuntimeError**: a bug: a&#124;b" in (tmp_path / "bug.md").read_text()


def test_summaries_hold_hostile_names_of_documents():
    for name in HOSTILE:
        error = {"class": "SourceError", "message": name, "remedy": name, "tensor": name, "file": name}
        made = rendered(summary({"command": "plan", "status": "error", "error": error}))
        assert set(re.findall(r"<(\w+)", made)) == {"h2", "p", "strong", "code"}, name
        finding = {"check": name, "level": "error", "message": name, "tensor": name, "file": name, "remedy": name}
        verified = {"command": "verify", "status": "failed", "output": name, "num_tensors": 1, "checks": [name]}
        made = rendered(summary({**verified, "errors": [], "weights": [], "findings": [finding]}))
        assert made.count("<td") == 5, name
