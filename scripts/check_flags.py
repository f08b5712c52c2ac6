#!/usr/bin/env python
"""Checks every flag that serve-plan writes against the engines' own argument definitions: name, values, deprecation.

Give folders with unpacked wheels of SGLang 0.5.23 (sglang), vLLM 0.33.0 (vllm) and of the router (sglang_router): `pip
download --no-deps`, then unzip. Nothing of them is imported or run: their source is parsed.

    scripts/check_flags.py FOLDER [FOLDER ...]
"""

import argparse
import ast
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from quantkit.engines.parallel import Parallel
from quantkit.memory.gpus import gpu_named
from quantkit.memory.kv_format import KvDtype
from quantkit.serving import sglang
from quantkit.serving.agreed import agreed_flags
from quantkit.serving.flags import Server
from quantkit.serving.make import make_serve_plan
from quantkit.serving.request import Network, ServeRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """``choices``: None where any value will do."""

    choices: frozenset[str] | None = None
    is_deprecated: bool = False


Definitions = Mapping[str, Definition]
_BUILTINS = re.compile(r"Builtins: ([\w, ]+)\.")  # that a help text names, where there are no choices


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def constants(module: ast.Module) -> dict[str, frozenset[str]]:
    """Names of a module that stand for words: lists, tuples, sets, Literals and the keys of dictionaries."""
    found: dict[str, frozenset[str]] = {}
    for node in module.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        for target in targets:
            if isinstance(target, ast.Name) and value is not None:
                words = words_of(value, found)
                if words is not None:
                    found[target.id] = words
    return found


def words_of(node: ast.expr, known: Mapping[str, frozenset[str]]) -> frozenset[str] | None:
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Dict):
        return frozenset(str(key.value) for key in node.keys if isinstance(key, ast.Constant))
    if isinstance(node, ast.Subscript):
        inside = node.slice
        name = ast.unparse(node.value)
        if name.endswith("Optional"):
            return words_of(inside, known)
        if not name.endswith("Literal"):
            return None
        node = inside if isinstance(inside, ast.Tuple) else ast.Tuple(elts=[inside], ctx=ast.Load())
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        words: set[str] = set()
        for one in node.elts:
            if isinstance(one, ast.Constant):
                words.add(str(one.value))
            elif isinstance(one, ast.Name) and one.id in known:
                words |= known[one.id]
        return frozenset(words) or None
    return None


def calls(module: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
            yield node


def option_names(call: ast.Call) -> Iterator[str]:
    """Of add_argument; what an f-string has in braces is a prefix that is empty here."""
    for one in call.args:
        if isinstance(one, ast.Constant):
            yield str(one.value)
        elif isinstance(one, ast.JoinedStr):
            yield "".join(str(part.value) for part in one.values if isinstance(part, ast.Constant))


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((one.value for one in call.keywords if one.arg == name), None)


def is_said_to_be_deprecated(node: ast.expr | None) -> bool:
    text = "" if node is None else ast.unparse(node).lstrip("\"'f(").lower()
    return text.startswith("deprecated")


def added(module: ast.Module, known: Mapping[str, frozenset[str]]) -> dict[str, Definition]:
    """What a file registers with add_argument."""
    found: dict[str, Definition] = {}
    for call in calls(module, "add_argument"):
        action = keyword(call, "action")
        choices = keyword(call, "choices")
        definition = Definition(
            choices=None if choices is None else words_of(choices, known),
            is_deprecated=is_said_to_be_deprecated(keyword(call, "help"))
            or (action is not None and "Deprecated" in ast.unparse(action)),
        )
        found |= dict.fromkeys(option_names(call), definition)
    return found


def sglang_definitions(folder: Path) -> Definitions:
    groups = folder / "sglang/srt/arg_groups"
    known = constants(tree(groups / "choices.py"))
    found: dict[str, Definition] = {}
    for path in sorted((groups / "fields").glob("*.py")):
        module = tree(path)
        local = known | constants(module)
        for body in (node.body for node in module.body if isinstance(node, ast.ClassDef)):
            for field in body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    found |= sglang_field(field.target.id, field.annotation, local)
    found |= added(tree(folder / "sglang/srt/server_args.py"), known)
    for option, file, name in (
        ("--tool-call-parser", "function_call/parser_names.py", "TOOL_CALL_PARSER_NAMES"),
        ("--reasoning-parser", "parser/reasoning_parser_names.py", "REASONING_PARSER_NAMES"),
    ):
        names = constants(tree(folder / "sglang/srt" / file))[name]
        found[option] = replace(found[option], choices=names | {"auto"})
    return found


def sglang_field(name: str, annotation: ast.expr, known: Mapping[str, frozenset[str]]) -> dict[str, Definition]:
    """The options of one field: ``A[type, "help"]``, or ``A[type, Arg(...)]``."""
    if not (isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple)):
        return {}
    kind, about = annotation.slice.elts[:2]
    options, choices, help_text = [f"--{name.replace('_', '-')}"], words_of(kind, known), about
    if isinstance(about, ast.Call):
        if keyword(about, "no_cli") is not None:
            return {}
        renamed, aliases = keyword(about, "cli_name"), keyword(about, "aliases")
        if isinstance(renamed, ast.Constant):
            options = [str(renamed.value)]
        if aliases is not None:
            options += sorted(words_of(aliases, known) or ())
        given = keyword(about, "choices")
        choices = choices if given is None else words_of(given, known)
        help_text = keyword(about, "help") or ast.Constant("")
    if choices is None and (listed := _BUILTINS.search(ast.unparse(help_text))) is not None:
        choices = frozenset(listed[1].split(", "))
    definition = Definition(choices=choices, is_deprecated=is_said_to_be_deprecated(help_text))
    return dict.fromkeys(options, definition)


def vllm_definitions(folder: Path) -> Definitions:
    root = folder / "vllm"
    found = added(tree(root / "engine/arg_utils.py"), {})
    frontend = tree(root / "entrypoints/common/cli_args.py")
    found |= added(frontend, {})
    for body in (
        node for node in frontend.body if isinstance(node, ast.ClassDef) and node.name.endswith("FrontendArgs")
    ):
        for field in body.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                found[f"--{field.target.id.replace('_', '-')}"] = Definition()
    for option, path, name in (
        ("--kv-cache-dtype", "config/cache.py", "CacheDType"),
        ("--spec-method", "config/speculative.py", "SpeculativeMethod"),
        ("--tool-call-parser", "tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER"),
        ("--reasoning-parser", "reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER"),
    ):
        found[option] = replace(found[option], choices=nested_words(tree(root / path), name))
    return found


def nested_words(module: ast.Module, name: str) -> frozenset[str]:
    """Of a Literal that is made of other Literals."""
    known = constants(module)
    for _ in range(3):
        for node in module.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                words = words_of(node.value, known)
                if words is not None:
                    known[node.targets[0].id] = words
    return known[name]


def router_definitions(folder: Path) -> Definitions:
    return added(tree(folder / "sglang_router/router_args.py"), {})


READERS: Mapping[str, Callable[[Path], Definitions]] = {
    "sglang": sglang_definitions,
    "vllm": vllm_definitions,
    "sglang_router": router_definitions,
}
H200 = gpu_named("h200")
TP8, TP16 = Parallel(tp=8), Parallel(tp=16)
CASES = (
    ServeRequest(output="glm-5.2", prefill="glm-5.2", gpu=H200, concurrency=8, context=65536),
    ServeRequest(output="glm-5.2", prefill="glm-5.2", gpu=H200, kv_dtype=KvDtype.BF16, mtp=False),
    ServeRequest(output="glm-5", prefill="glm-5", gpu=gpu_named("b200"), network=Network(ib_device="mlx5_0")),
    ServeRequest(output="glm-5", gpu=gpu_named("b200"), kv_dtype=KvDtype.BF16),
    ServeRequest(output="glm-5.2", gpu=gpu_named("mi355x")),
    ServeRequest(output="glm-5.2", gpu=H200, draft="glm-5.2"),
    ServeRequest(output="glm-5.2", gpu=H200, parallel=Parallel(tp=8, ep=8, dp_attention=8)),
    ServeRequest(output="kimi-k2-0905", prefill="kimi-k2-0905", gpu=H200, prefill_tp=16),
    ServeRequest(output="kimi-k2.5", prefill="kimi-k2.5", gpu=H200),
    ServeRequest(output="glm-4.6", gpu=H200),
    ServeRequest(output="glm-4.7", gpu=H200),
    ServeRequest(output="glm-5.2", gpu=H200, engine="vllm", concurrency=8, context=65536),
    ServeRequest(output="kimi-k2.5", gpu=H200, engine="vllm", parallel=TP16),
    ServeRequest(output="glm-4.7", gpu=H200, engine="vllm", parallel=Parallel(tp=8, ep=8, dp_attention=8)),
)


def servers() -> Iterator[Server]:
    """Of many deployments, and of one with w4afp8 experts over DeepEP."""
    for request in CASES:
        yield from make_serve_plan(request).servers
    request = CASES[0]
    plan = make_serve_plan(request)
    output = plan.pools[-1]
    config = {**output.served.config, "quantization_config": {"quant_method": "w4afp8"}}
    pool = replace(output, served=replace(output.served, config=config), backend="deepep")
    agreed = agreed_flags(request, (plan.pools[0], pool), has_mtp=True)
    yield from sglang.pool_servers(request, pool, agreed, hosts=("decode",), port=30001)


def package_of(server: Server) -> str:
    return "vllm" if server.program[0] == "vllm" else server.program[-1].partition(".")[0]


def problems(server: Server, definitions: Definitions) -> Iterator[str]:
    for one in server.flags:
        definition = definitions.get(one.name)
        if definition is None:
            yield f"{one.name}: there is no such flag"
            continue
        if definition.is_deprecated:
            yield f"{one.name}: is deprecated"
        if definition.choices is not None:
            yield from (f"{one.name} {word}: is no choice" for word in one.values if word not in definition.choices)


def check(folders: list[Path]) -> tuple[dict[str, set[str]], set[str]]:
    """Flags that were checked, by package, and what is wrong."""
    there = {
        package: reader(folder)
        for package, reader in READERS.items()
        for folder in folders
        if (folder / package).is_dir()
    }
    checked: dict[str, set[str]] = {package: set() for package in there}
    wrong: set[str] = set()
    for server in servers():
        package = package_of(server)
        if package in there:
            checked[package] |= {one.name for one in server.flags}
            wrong |= {f"{package}: {problem}" for problem in problems(server, there[package])}
    return checked, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    checked, wrong = check(parser.parse_args().folders)
    if not checked:
        sys.exit(f"none of these folders holds one of {', '.join(READERS)}")
    for package, flags in checked.items():
        print(f"{package}: {len(flags)} flags: {' '.join(sorted(flags))}")
    for problem in sorted(wrong):
        print(problem)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
