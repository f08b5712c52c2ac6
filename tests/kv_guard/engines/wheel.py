"""SGLang's wheel, imported on a machine that has none of what it depends on: only what the guard touches is real.

`QUANTKIT_SGLANG` names the folder that holds the unpacked `sglang`. Its own modules run as they are. What they import
and this machine lacks is a stand-in that answers anything, which nothing under test asks; msgspec's structs, which they
define their data with, are dataclasses here. Two packages are entered without their `__init__`, which patch other
libraries and import every model's config.
"""

import dataclasses
import importlib.abc
import importlib.machinery
import inspect
import os
import sys
import types
import warnings
from pathlib import Path

import torch

VARIABLE = "QUANTKIT_SGLANG"
_NOT_ENTERED = ("sglang", "sglang.srt.configs")
_ABSENT = {
    *("IPython", "PIL", "aiohttp", "compressed_tensors", "einops", "fastapi", "huggingface_hub", "msgspec", "numba"),
    *("openai", "orjson", "partial_json_parser", "prometheus_client", "pybase64", "pydantic", "requests", "scipy"),
    *("sentencepiece", "starlette", "torchao", "torchvision", "tqdm", "transformers", "tvm_ffi", "xgrammar", "zmq"),
}


def folder():
    """Where the wheel is, or None."""
    path = os.environ.get(VARIABLE)
    return Path(path) if path else None


class _AnyClass(type):
    """Classes of stand-ins: any attribute, any item, any operator."""

    def __getattr__(cls, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _anything(name)

    def __or__(cls, other):
        return cls

    __ror__ = __getitem__ = __or__

    def __iter__(cls):
        return iter(())

    def __setitem__(cls, key, value):
        pass


def _anything(name):
    class Anything(metaclass=_AnyClass):
        def __init__(self, *args, **kwargs):
            pass

        def __init_subclass__(cls, **kwargs):
            pass

        def __call__(self, *args, **kwargs):
            return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

        def __getattr__(self, attribute):
            if attribute.startswith("__") and attribute.endswith("__"):
                raise AttributeError(attribute)
            return _anything(attribute)()

        def __getitem__(self, key):
            return _anything("item")()

        def __iter__(self):
            return iter(())

        def __bool__(self):
            return False

    Anything.__name__ = Anything.__qualname__ = name
    return Anything


class _StandIn(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        setattr(self, name, _anything(name))
        return getattr(self, name)


class _Missing:
    """msgspec's NODEFAULT."""


class _Struct:
    def __init_subclass__(cls, *, kw_only=False, **options):
        for name in inspect.get_annotations(cls):
            value = cls.__dict__.get(name)
            if isinstance(value, (list, dict, set)):
                setattr(cls, name, dataclasses.field(default_factory=value.copy))
        dataclasses.dataclass(unsafe_hash=True, kw_only=kw_only)(cls)
        cls.__struct_fields__ = tuple(field.name for field in dataclasses.fields(cls))


def _fields(struct):
    def given(value):
        return _Missing if value is dataclasses.MISSING else value

    return [
        types.SimpleNamespace(
            name=field.name,
            encode_name=field.name,
            type=field.type,
            default=given(field.default),
            default_factory=given(field.default_factory),
        )
        for field in dataclasses.fields(struct)
    ]


def _defstruct(name, fields, namespace=(), **_):
    body = dict(namespace) | {"__annotations__": {field[0]: field[1] for field in fields}}
    for field in fields:
        body.pop(field[0], None)
        body.update({field[0]: field[2]} if len(field) == 3 else {})
    return type(name, (_Struct,), body, kw_only=True)


def _msgspec():
    module, structs = _StandIn("msgspec"), _StandIn("msgspec.structs")
    module.Struct, module.NODEFAULT, module.defstruct, module.structs = _Struct, _Missing, _defstruct, structs
    module.field = lambda **given: dataclasses.field(**{k: v for k, v in given.items() if k.startswith("default")})
    structs.fields, structs.replace, structs.asdict = _fields, dataclasses.replace, dataclasses.asdict
    structs.force_setattr = object.__setattr__
    sys.modules["msgspec.structs"] = structs
    return module


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in _ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _msgspec() if spec.name == "msgspec" else _StandIn(spec.name)

    def exec_module(self, module):
        pass


def enter(root, modules):
    """Import ``modules`` of the `sglang` in ``root``; for a process whose only tests are the wheel's."""
    sys.meta_path.insert(0, _Finder())
    for name in _NOT_ENTERED:
        package = _StandIn(name)
        package.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = package
    compiles, torch.compile = torch.compile, lambda *_, **__: lambda function: function  # importing it takes a minute
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in modules:
            importlib.import_module(name)
    torch.compile = compiles
