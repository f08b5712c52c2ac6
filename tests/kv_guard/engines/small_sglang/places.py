"""Where things of the miniature stand: under the names that they have in SGLang, in `sys.modules`."""

import importlib
import sys
import types
from collections import defaultdict

ROOT = "sglang.srt."
_CONTENTS = defaultdict(dict)


def at(*modules):
    """Put a class or function into modules below `sglang.srt`; the first is its own, others import it."""

    def put(thing):
        thing.__module__ = ROOT + modules[0]
        for module in modules:
            _CONTENTS[ROOT + module][thing.__name__] = thing
        return thing

    return put


def srt(module):
    """A module as it is now: what hooks have put there is called."""
    return importlib.import_module(ROOT + module)


def modules(only=None):
    """Modules by full name, with the packages above them."""
    made = {}
    for name, contents in _CONTENTS.items():
        if only is not None and name.removeprefix(ROOT) not in only:
            continue
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        made[name] = module
    return made


def packages_of(names):
    """Empty packages above modules, outermost first."""
    made = {}
    for name in sorted(names):
        parts = name.split(".")
        for end in range(1, len(parts)):
            package = ".".join(parts[:end])
            if package not in names and package not in made:
                made[package] = types.ModuleType(package)
                made[package].__path__ = []
    return made


def install(monkeypatch):
    """The whole miniature, for one test."""
    made = modules()
    for name, module in (packages_of(made) | made).items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
    version = types.ModuleType("sglang.version")
    version.__version__ = "0.5.23"
    monkeypatch.setitem(sys.modules, "sglang.version", version)
