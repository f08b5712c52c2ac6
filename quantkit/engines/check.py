"""The loader contract of one engine: what it builds, what is stored, and what the launch adds."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from quantkit.engines.contract import Contract, leaves_of, renamed
from quantkit.engines.kv_scales import kv_scale_verdicts
from quantkit.engines.launch import Launch, launch_verdicts
from quantkit.engines.matching import MatchError
from quantkit.engines.runtime import EngineRules, Kind, RuntimeModule, runtime_modules
from quantkit.engines.schemes import Scheme, quantization_document, read_section, section_errors
from quantkit.engines.sglang import SGLANG
from quantkit.engines.verdicts import EngineReport, ModuleVerdict, Outcome, collect_rows
from quantkit.engines.vllm import VLLM
from quantkit.families.config_values import Config
from quantkit.families.family import Family
from quantkit.tensors import TensorSpec

RULES: Mapping[str, EngineRules] = {rules.name: rules for rules in (SGLANG, VLLM)}
_METHODS = ("", "compressed-tensors", "w4afp8")
_CONFIG = "quantization_config"
_RELAID_OUT = ("gptq", "awq", "auto-round")
_RELAYOUT = "quantkit relayout IN OUT --format compressed-tensors makes of it what is known to load"
# of other tools' methods, for models with routed experts
_REFUSED = {
    ("sglang", "gptq"): (
        "AssertionError: scales of GPTQ experts are FP16 and activations are not; those of down_proj are sized for the "
        "whole width, too, so more than one rank would read the wrong ones"
    )
}


def check_engine(
    family: Family, config: Config, stored: Mapping[str, TensorSpec], launch: Launch, *, root: str
) -> EngineReport:
    """``config``: a whole config.json; ``stored``: every tensor by name; ``root``: what stands before ``layers.N``.

    No file is read. A family or a method whose loading is not known gives the verdict 'unknown', never 'loads'.
    """
    rules = RULES[launch.engine]
    verdicts = _verdicts(family, config, stored, launch, rules, root)
    return EngineReport(engine=launch.engine, version=rules.version, rows=collect_rows(verdicts))


def _verdicts(
    family: Family,
    config: Config,
    stored: Mapping[str, TensorSpec],
    launch: Launch,
    rules: EngineRules,
    root: str,
) -> Iterator[ModuleVerdict]:
    model = rules.models.get(family.name)
    document = quantization_document(config)
    if model is None:
        message = f"which modules {rules.name} builds for the family {family.name!r} is not known"
        yield ModuleVerdict(module=family.name, outcome=Outcome.UNKNOWN, message=message)
        if not list(section_errors(document)):
            yield from kv_scale_verdicts(family, config, stored, read_section(document), launch.engine)
        return
    problems = list(_document_verdicts(document, rules))
    yield from problems
    if problems:
        return
    section = renamed(read_section(document), model.renames)
    if not rules.reads_native_linears:
        section = replace(section, has_native_linears=False)
    contract = Contract(rules=rules, model=model, section=section, leaves=leaves_of(stored))
    modules = _built(list(runtime_modules(family, config, model, root=root)), contract)
    yield from (contract.verdict(module) for module in modules)
    experts = next((module for module in modules if module.kind is Kind.EXPERTS), None)
    scheme: Scheme | None = None
    if experts is not None:
        try:
            scheme = contract.scheme_of(experts)
        except MatchError:
            return  # said of the module already
    yield from launch_verdicts(family, config, section, scheme, launch)
    yield from kv_scale_verdicts(family, config, stored, section, launch.engine)


def _built(modules: list[RuntimeModule], contract: Contract) -> list[RuntimeModule]:
    """Without what files may lack: an indexer that reuses another's choice, a copy of a head, a whole draft."""
    has_draft = any(module.is_draft and contract.is_stored(module) for module in modules)

    def is_built(module: RuntimeModule) -> bool:
        may_lack = all(member.optional for member in module.members)
        return (has_draft or not module.is_draft) and (not may_lack or contract.is_stored(module))

    return [module for module in modules if is_built(module)]


def _document_verdicts(document: Mapping[str, Any], rules: EngineRules) -> Iterator[ModuleVerdict]:
    """What ends the look at a config before any module."""
    method = str(document.get("quant_method", ""))
    if (rules.name, method) in _REFUSED:
        message, remedy = _REFUSED[rules.name, method], _RELAYOUT
        yield ModuleVerdict(module=_CONFIG, outcome=Outcome.REFUSED, message=message, remedy=remedy)
        return
    if method not in _METHODS:
        message = f"how {rules.name} reads {method!r} checkpoints is not stated here"
        remedy = _RELAYOUT if method in _RELAID_OUT else ""
        yield ModuleVerdict(module=_CONFIG, outcome=Outcome.UNKNOWN, message=message, remedy=remedy)
        return
    for problem in section_errors(document):
        remedy = "correct quantization_config"
        yield ModuleVerdict(module=_CONFIG, outcome=Outcome.REFUSED, message=problem, remedy=remedy)
    if method == "w4afp8" and not rules.reads_w4afp8:
        message, remedy = "w4afp8 is a format of SGLang alone", _RELAYOUT
        yield ModuleVerdict(module=_CONFIG, outcome=Outcome.REFUSED, message=message, remedy=remedy)
