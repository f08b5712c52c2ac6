#!/usr/bin/env python
"""Compares how we match names with what the engines' own code answers, on many random configs and names.

Give a folder with the unpacked wheel of SGLang 0.5.23, of vLLM 0.33.0, or of both (`pip download --no-deps`, then
unzip). Their matching needs nothing but torch, compressed-tensors and regex; whatever else the files import is a stub.

    scripts/compare_matching.py FOLDER [--questions 20000]
"""

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from quantkit.engines.check import RULES
from quantkit.engines.matching import MatchError
from quantkit.engines.runtime import ModelRules

SGLANG_FILE = "sglang/srt/layers/quantization/compressed_tensors/utils.py"
VLLM_MODULES = ("compressed_tensors.utils", "utils.config_utils")
VLLM_PREFIX = "vllm.model_executor.layers.quantization"

LEAVES = (
    *(f"self_attn.{one}" for one in ("fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa", "qkv_proj", "q_a_proj")),
    *(f"self_attn.{one}" for one in ("kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj", "indexer.wq_b")),
    *(f"mlp.{one}" for one in ("gate_up_proj", "gate_proj", "up_proj", "down_proj", "experts.0.gate_proj")),
    *(f"mlp.shared_experts.{one}" for one in ("gate_up_proj", "gate_proj", "up_proj", "down_proj")),
)
PREFIXES = ("model.layers.3", "model.layers.78", "model.decoder", "language_model.model.layers.3")
CLASSES = ("ColumnParallelLinear", "MergedColumnParallelLinear", "ReplicatedLinear", "FusedMoE", "RoutedExperts")
ENTRIES = (
    *(
        "lm_head",
        "Linear",
        "linear",
        "ReplicatedLinear",
        "re:.*Linear$",
        "FusedMoE",
        "re:self_attn",
        "re:.*self_attn.*",
    ),
    *(r"re:.*mlp\.gate", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*shared_experts.*", r"re:.*\.q_a_proj$"),
    *(r"re:.*\.(q_a_proj|kv_a_proj_with_mqa)$", r"re:.*fused_qkv_a_proj(_with_mqa)?$", r"re:.*mlp\.experts\..*"),
    *(r"re:model\.(layers\.78|decoder)\..*", r"re:language_model\..*", r"re:.*(gate|up)_proj$", "self_attn.kv_b_proj"),
)


class _Stub(types.ModuleType):
    """Has whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[:1].isupper() else (lambda *_, **__: None)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of one package from a folder, if they are named; stubs for all others."""

    def __init__(self, folder: Path, package: str, real: frozenset[str]) -> None:
        self.folder, self.package, self.real = folder, package, real

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != self.package:
            return None
        if name in self.real:
            return importlib.util.spec_from_file_location(name, self.folder / (name.replace(".", "/") + ".py"))
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        stub = _Stub(spec.name)
        stub.__path__ = []
        return stub

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def load_sglang(folder: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("sglang_matching", folder / SGLANG_FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_vllm(folder: Path) -> types.ModuleType:
    names = frozenset(f"{VLLM_PREFIX}.{one}" for one in VLLM_MODULES)
    sys.meta_path.insert(0, _Finder(folder, "vllm", names))
    return importlib.import_module(f"{VLLM_PREFIX}.{VLLM_MODULES[0]}")


def answered(call: Callable[..., object], *arguments: object, **options: object) -> object:
    """What comes back, or the word error."""
    try:
        return call(*arguments, **options)
    except (ValueError, MatchError):
        return "error"


def compare(engine: str, theirs: types.ModuleType, num_questions: int) -> int:
    """The number of answers that differ."""
    rng = random.Random(1)
    rules = RULES[engine]
    models: list[ModelRules] = list(rules.models.values())
    plain = ["model.layers.3." + leaf for leaf in LEAVES]
    different = 0
    for _ in range(num_questions):
        packed = rng.choice(models).packed
        lists = {key: list(parts) for key, parts in packed.items()}
        name = f"{rng.choice(PREFIXES)}.{rng.choice(LEAVES)}"
        entries = rng.sample((*ENTRIES, *plain), rng.randint(0, 4))
        module = type(rng.choice(CLASSES), (), {})()
        ours, fused = rules.matching, {"fused_mapping": lists}
        found = {
            "ignored": (
                answered(theirs.should_ignore_layer, name, ignore=entries, **fused),
                answered(ours.is_ignored, name, entries, packed),
            ),
            "target": (
                answered(theirs.find_matched_target, name, module, entries, **fused),
                answered(ours.find_target, name, type(module).__name__, entries, packed),
            ),
        }
        # the target Linear stands for the classes of experts: the engines add those to the list themselves
        if "Linear" in entries and type(module).__name__ in rules.matching.expert_classes:
            del found["target"]
        for what, (wanted, got) in found.items():
            if wanted != got:
                different += 1
                print(f"{engine} {what}: {name} ({type(module).__name__}) in {entries}: {wanted}, ours {got}")
    return different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--questions", type=int, default=20_000)
    options = parser.parse_args()
    loaders = {"sglang": load_sglang, "vllm": load_vllm}
    there = [engine for engine in loaders if (options.folder / engine).is_dir()]
    if not there:
        sys.exit(f"{options.folder} holds neither sglang nor vllm")
    different = 0
    for engine in there:
        found = compare(engine, loaders[engine](options.folder), options.questions)
        print(f"{engine} {RULES[engine].version}: {options.questions} configs and names, {found} answers differ")
        different += found
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
