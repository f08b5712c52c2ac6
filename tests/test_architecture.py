"""Layers import downward only; every unit has its place; files stay small, or say here why not."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# lowest first; units of one level do not know each other
LAYERS = [
    {"errors", "__init__"},
    {"registry", "tensors", "threads", "machine", "patterns", "module_names", "hidden_states"}
    | {"recipe_files", "recipe_settings", "recipe_data"},
    {"checkpoint", "numerics", "gate", "kv_guard"},
    {"codecs", "families", "integrity", "statistics", "words"},
    {"layouts", "engines", "importance"},
    {"weights", "recipe"},
    {"transcode", "sources", "memory"},
    {"plan", "streaming"},
    {"verify", "calibrate", "evaluate", "gptq"},
    {"convert", "serving"},
    {"calibrated", "kv_scales"},
    {"cli"},
]
RUN_MODELS = {"streaming", "calibrate", "evaluate", "gptq", "calibrated", "kv_guard"}
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}
MAX_LINES = 300
LONG_FILES: dict[str, str] = {}  # path to reason
FILE_NAME = re.compile(
    r"[\w{:}-]+(\.[\w{:}-]+)*\.(json|jsonl|lock|md|draft|safetensors|bin)|\.(cache|quantkit(\.\w+)?)"
)


def modules() -> list[Path]:
    return sorted((ROOT / "quantkit").rglob("*.py"))


def unit_of(path: Path) -> str:
    return path.relative_to(ROOT / "quantkit").parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_units_import_downward_only(path: Path) -> None:
    unit = unit_of(path)
    assert unit in LEVEL, f"{unit} is not placed in LAYERS"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "quantkit" or len(parts) == 1:
            continue
        other = parts[1]
        if other in {"__version__", unit}:
            continue
        assert other in LEVEL, f"{path}: {name}"
        assert LEVEL[other] < LEVEL[unit], f"{path} imports {name}, which is not below it"


def test_the_guard_knows_neither_engines_nor_the_simulation() -> None:
    """In a serving engine it imports `errors` alone of quantkit; plugins know no simulation, and its core neither."""
    parts = {"engines", "simulation"}
    for path in (ROOT / "quantkit" / "kv_guard").rglob("*.py"):
        names = [name.split(".") for name in imports(path)]
        ours = [name for name in names if name[0] == "quantkit" and len(name) > 1]
        assert {name[1] for name in ours} <= {"errors", "kv_guard"}, path
        part = path.relative_to(ROOT / "quantkit" / "kv_guard").parts[0]
        known = {name[2] for name in ours if len(name) > 2 and name[1] == "kv_guard"} & parts
        assert known <= ({part} & parts), path


def test_plugins_of_two_engines_do_not_know_each_other() -> None:
    """Nor does what they share know either."""
    shared = ROOT / "quantkit" / "kv_guard" / "engines"
    plugins = {path.parent.name for path in shared.rglob("plugin.py")}
    assert plugins == {"sglang", "vllm"}
    for path in shared.rglob("*.py"):
        names = [name.split(".") for name in imports(path) if name.startswith("quantkit.kv_guard.engines.")]
        own = {path.parent.name} & plugins
        assert {name[3] for name in names} & plugins <= own, path


def test_a_file_name_stands_in_one_module() -> None:
    """What two modules must spell alike is a constant of one, and imported."""
    modules_of: dict[str, set[Path]] = defaultdict(set)
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and FILE_NAME.fullmatch(node.value):
                modules_of[node.value].add(path)
    assert {"run.json", "layer-{:05}.safetensors"} <= modules_of.keys()
    assert {name: paths for name, paths in modules_of.items() if len(paths) > 1} == {}


def test_layers_and_experts_are_read_from_names_in_one_module() -> None:
    """Beside it: what families are, what is written for engines to match, and a key that must be quick."""
    pattern = re.compile(r"(layers|experts)\\\.|^\.?(layers|experts)\.$")
    found = {
        path.relative_to(ROOT / "quantkit").as_posix()
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and pattern.search(node.value)
    }
    families = {"families/decoder.py", "families/generic.py", "families/roles.py"}
    for_engines = {"layouts/compressed_tensors.py", "plan/mtp.py", "engines/sglang.py"}
    assert found == {"module_names.py", "memory/tensor_groups.py"} | families | for_engines


def test_kernels_import_nothing_of_ours() -> None:
    for path in (ROOT / "kernels").rglob("*.py"):
        assert not [name for name in imports(path) if name.split(".")[0] == "quantkit"], path


def test_kernels_is_a_source_root_and_no_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_the_conversion_path_imports_no_torch() -> None:
    """Nor a unit that does, except where a command is chosen."""
    for path in modules():
        names = list(imports(path))
        if unit_of(path) not in RUN_MODELS:
            assert not {"torch", "transformers", "safetensors"} & {name.split(".")[0] for name in names}, path
        if unit_of(path) not in RUN_MODELS | {"cli"}:
            assert not RUN_MODELS & {name.split(".")[1] for name in names if name.startswith("quantkit.")}, path


@pytest.mark.parametrize("folder", ["quantkit", "kernels", "scripts"])
def test_files_are_small(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        num_lines = len(path.read_text().splitlines())
        assert num_lines <= MAX_LINES or name in LONG_FILES, f"{name} has {num_lines} lines"


def test_the_root_holds_what_it_may() -> None:
    allowed = {"pyproject.toml", "quantkit", "kernels", "recipes", "scripts", "tests"}
    allowed |= {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"}
    import subprocess

    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {name.split("/")[0] for name in tracked.splitlines() if not name.startswith(".")} <= allowed
