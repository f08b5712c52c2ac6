#!/usr/bin/env python
"""Writes the generated parts of README.md: tables from the registries, output of the commands from real runs.

scripts/update_docs.py            rewrite README.md
scripts/update_docs.py --check    exit with 1 when it is out of date
"""

import argparse
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from quantkit.cli.app import app
from quantkit.families import FAMILIES
from quantkit.kv_guard.faults import MEANING, Fault
from quantkit.memory.gpus import GPUS
from quantkit.recipe_files import recipe_config, recipe_summaries
from quantkit.weights.source_form import SOURCE_METHODS
from scripts import compare_planners, gate_examples, ground_truth, published_rates
from scripts.make_checkpoint import SMALL, glm_config, make_checkpoint

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
_BLOCK = re.compile(r"(<!-- generated: (?P<name>[\w ]+) -->\n)(?P<text>.*?)(<!-- end -->)", re.DOTALL)
MEMORY_OPTIONS = ("--gpu", "h200", "--kv-dtype", "fp8", "--context", "131072")
SERVE_OPTIONS = ("--context", "131072", "--concurrency", "10")
# what differs from run to run and machine to machine
_VARYING = re.compile(r"in [\d.]+ s \(\d+ MB/s\)|\d+ workers +[\d.]+ GiB")


def table(columns: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def sources() -> str:
    return table(
        ["`quant_method`", "weights"],
        [
            [f"`{name}`" if name != "none" else "none", form]
            for name, method in SOURCE_METHODS.items()
            for form in method.forms
        ],
    )


def families() -> str:
    rows = [
        [f"`{name}`", ", ".join(f"`{one}`" for one in family.model_types) or "any other", known]
        for name, family in sorted(FAMILIES.items())
        for known in ["every tensor, from the config alone" if family.is_known else "names and shapes in the headers"]
    ]
    return table(["family", "`model_type`", "what is known"], rows)


def recipes() -> str:
    return table(
        ["recipe", "source", "group", "what it does"],
        [[f"`{one.name}`", one.hub_id, str(one.group_size), one.description] for one in recipe_summaries()],
    )


def guard_faults() -> str:
    return table(["fault", "what it says"], [[f"`{fault}`", MEANING[fault]] for fault in Fault])


def gpus() -> str:
    rows = [
        [
            f"`{gpu.name}`",
            gpu.title,
            f"{gpu.total_gib:g}",
            f"{gpu.free_before_load_gib:.1f}",
            f"{gpu.bandwidth / 1e12:g}",
            gpu.architecture.value,
        ]
        for gpu in GPUS.values()
    ]
    columns = ["`--gpu`", "card", "GiB (torch)", "GiB free before loading", "TB/s (data sheet)", "architecture"]
    return table(columns, rows)


@contextlib.contextmanager
def small_checkpoint() -> Iterator[None]:
    """A directory with the quickstart's checkpoint in it, as the working directory."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as directory:
        config = glm_config(SMALL, experts=8, layers=4, dense_layers=1, mtp=True)
        make_checkpoint(Path(directory) / "GLM-5.2-FP8", config, num_shards=3)
        os.chdir(directory)
        try:
            yield
        finally:
            os.chdir(before)


def run(*arguments: str) -> str:
    """Stdout of a command, as a shell session."""
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(io.StringIO()):
        app(list(arguments), standalone_mode=False)
    return f"$ quantkit {' '.join(arguments)}\n{stdout.getvalue().rstrip()}\n"


def session(*commands: tuple[str, ...]) -> str:
    return "```text\n" + "\n".join(run(*command) for command in commands) + "```\n"


def serve_plan() -> str:
    """A pair, with the prefill pool's and the router's lines left out: they are like those of the decode pool."""
    text = session(("serve-plan", "glm-5.2", "--prefill", "glm-5.2", "--gpu", "h200", "--tp", "8", *SERVE_OPTIONS))
    before, _, rest = text.partition("# prefill, on")
    return f"{before}...\n# decode, on{rest.partition('# decode, on')[2].partition('# router, on')[0]}...\n```\n"


def calibration_needs() -> str:
    """Of GLM-5.2 from its config; the rest of the plan is left out."""
    directory = Path("GLM-5.2")  # of its own: a working directory with a config is what memory-plan would take
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(recipe_config("glm-5.2")))
    text = session(("plan", "--config", "GLM-5.2/config.json", "--method", "gptq"))
    command, title = text.partition("Plan: ")[0], "Needs of --method gptq\n"
    needs = text.partition(title)[2].partition("\n\n")[0]
    return f"{command}...\n{title}{needs}\n...\n```\n"


def gate() -> str:
    """What a passing gate prints, of simulated logs."""
    gate_examples.write_logs(Path("evals"))
    return session(("gate", "evals/fp8", "evals/int4", "--max-drop", "0.8"))


def blocks() -> dict[str, Callable[[], str]]:
    source, output = "GLM-5.2-FP8", "glm-5.2-int4"
    return {
        "sources": sources,
        "families": families,
        "recipes": recipes,
        "plan": lambda: session(("plan", source, "--to", "int4", "--jobs", "2")),
        "convert": lambda: session(("convert", source, "--to", "int4", "-o", output)),
        "verify": lambda: session(("verify", output, "--source", source)),
        "calibration needs": calibration_needs,
        "kv scales": lambda: session(("kv-scales", source)),
        "inspect": lambda: session(("inspect", output)),
        "memory plan": lambda: session(("memory-plan", "glm-5.2", "--to", "int4", "--tp", "8", *MEMORY_OPTIONS)),
        "memory comparison": lambda: session(
            ("memory-plan", "glm-5.2", "--compare", "fp8,int4", "--tp", "8", *MEMORY_OPTIONS)
        ),
        "memory overview": lambda: session(("memory-plan", "--tp", "8")),
        "ground truth": lambda: "\n".join(ground_truth.table()) + "\n",
        "serve plan": serve_plan,
        "serve estimate": lambda: (
            session(("serve-plan", "glm-5.2", "--no-mtp", "--estimate"))
            .partition("Weights that")[2]
            .join(("```text\nWeights that", ""))
        ),
        "published rates": lambda: "\n".join(published_rates.table()) + "\n",
        "planners": lambda: "\n".join(compare_planners.table()) + "\n",
        "gpus": gpus,
        "guard faults": guard_faults,
        "gate": gate,
        "gate sizes": lambda: "\n".join(gate_examples.table()) + "\n",
    }


def updated(text: str) -> str:
    made: dict[str, str] = {}
    with small_checkpoint():
        made = {name: make() for name, make in blocks().items()}
    used = {match["name"] for match in _BLOCK.finditer(text)}
    assert used == set(made), f"README.md has the blocks {used}, there are {set(made)}"
    return _BLOCK.sub(lambda match: match[1] + made[match["name"]] + match[4], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    new = updated(text)
    if arguments.check:
        if _VARYING.sub("", new) != _VARYING.sub("", text):
            sys.exit("README.md is out of date: run scripts/update_docs.py")
    else:
        README.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
