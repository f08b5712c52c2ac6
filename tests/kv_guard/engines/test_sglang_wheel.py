"""The plugin against SGLang 0.5.23 itself: every target, and the scenarios on its own allocators, caches, processing.

Runs where `QUANTKIT_SGLANG` names the folder of the unpacked wheel, in a process of its own:
`QUANTKIT_SGLANG=... pytest tests/kv_guard/engines/test_sglang_wheel.py`.
"""

import ast
import inspect
import pkgutil

import pytest

from quantkit.kv_guard.engines.sglang.supported import ALLOCATORS, ROW_POOLS, SENT_POOLS, TREES
from quantkit.kv_guard.engines.sglang.targets import ROOT, TARGETS
from quantkit.kv_guard.engines.targets import parameters_of
from tests.kv_guard.engines.serving_parts import UNGUARDED
from tests.kv_guard.engines.small_sglang import places
from tests.kv_guard.engines.test_sglang_faults import *  # noqa: F403  the same scenarios
from tests.kv_guard.engines.test_sglang_given_up import *  # noqa: F403
from tests.kv_guard.engines.test_sglang_hooks import *  # noqa: F403
from tests.kv_guard.engines.test_sglang_readers import *  # noqa: F403
from tests.kv_guard.engines.test_sglang_retraction import *  # noqa: F403
from tests.kv_guard.engines.test_sglang_shared import *  # noqa: F403
from tests.kv_guard.engines.test_sglang_transfers import *  # noqa: F403
from tests.kv_guard.engines.wheel import enter, folder
from tests.kv_guard.engines.wheel_serving import MINIATURE, WheelServing, install

if folder() is None:
    pytest.skip("no wheel of SGLang is at hand (QUANTKIT_SGLANG)", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")  # the wheel's
REAL = (
    "mem_cache.unified_radix_cache",
    "mem_cache.allocation",
    "managers.scheduler_components.batch_result_processor",
    "managers.utils",
    "speculative.eagle_utils",
    "beam_search.coordinator",
    "disaggregation.decode",
)


@pytest.fixture(scope="session")
def wheel():
    enter(folder(), ["sglang.version", *(ROOT + name for name in REAL)])
    return folder()


@pytest.fixture(params=["python", "rust"])
def engine(request, wheel, monkeypatch):
    install(monkeypatch)
    overrides = []

    class Published(WheelServing):
        core = request.param

        def start(self):
            overrides.append(self.publish())
            return super().start()

    yield Published
    for override in overrides:
        override.restore()


def source_of(path):
    """A function as the wheel defines it, without running its module: of its parameters alone."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        file = folder().joinpath(*parts[:end]).with_suffix(".py")
        if file.exists():
            body = ast.parse(file.read_text()).body
            break
    for name in parts[end:]:
        found = next(node for node in body if getattr(node, "name", None) == name)
        body = found.body
    assert isinstance(found, ast.FunctionDef)
    found.decorator_list, found.returns = [], None
    found.body = [ast.Pass()]
    arguments = found.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    for argument in filter(None, every):
        argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [value and ast.Constant(None) for value in arguments.kw_defaults]
    names = {}
    exec(compile(ast.fix_missing_locations(ast.Module([found], [])), path, "exec"), names)
    return names[found.name]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_target_is_as_it_was_read(target):
    assert parameters_of(source_of(target.name)) == target.parameters


def test_the_miniature_has_the_wheels_parameters(monkeypatch):
    """Of each function and method that the miniature has, as far as it takes them."""
    differ = []
    for name, module in places.modules().items():
        for thing in vars(module).values():
            if getattr(thing, "__module__", None) != name:
                continue
            functions = (
                [thing] if inspect.isfunction(thing) else [f for f in vars(thing).values() if inspect.isfunction(f)]
            )
            for function in functions:
                path = f"{name}.{function.__qualname__}"
                if any(path == target.name for target in TARGETS):
                    theirs = parameters_of(source_of(path))
                    differ += [path] if parameters_of(function) != theirs else []
    assert differ == []


@pytest.mark.parametrize("name", [*ALLOCATORS, *ROW_POOLS, *SENT_POOLS, *TREES])
def test_a_class_that_is_known_exists(wheel, name):
    assert inspect.isclass(pkgutil.resolve_name(ROOT + name))


def literal(node):
    """A default that is written out: `= False`, or `msgspec.field(default=...)` left as it is, unknown."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return node


def test_the_options_exist_and_a_plain_server_is_covered(wheel):
    """The value that the guard covers is the one that SGLang has where nobody says another."""
    defaults = {
        node.target.id: literal(node.value)
        for file in (wheel / "sglang/srt/arg_groups/fields").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.AnnAssign) and node.value is not None
    }
    assert {name: defaults[name] for name in UNGUARDED} == UNGUARDED
    assert "disable_hybrid_swa_memory" in defaults  # which a refusal names
    assert all(name not in MINIATURE for name in ALLOCATORS)
