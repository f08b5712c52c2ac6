"""Stored scales of an FP8 KV cache: what names, shapes and config say of them.

What engines do with them is in ``kv_use``, and there alone.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from quantkit.engines.kv_use import Attention, KvPlace, KvScales, KvScope, KvUse, kv_use_in, why_lost
from quantkit.engines.parallel import EngineName
from quantkit.engines.schemes import Section
from quantkit.engines.verdicts import ModuleVerdict, Outcome
from quantkit.errors import SourceError
from quantkit.families.config_values import Config
from quantkit.families.family import Family
from quantkit.tensors import TensorSpec

KEY_LEAF, VALUE_LEAF = "k_scale", "v_scale"
SCALE_LEAVES = (f".{KEY_LEAF}", f".{VALUE_LEAF}")
STATIC_KV_SCHEME: Mapping[str, Any] = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}
"""The only ``kv_cache_scheme`` that SGLang reads scales for."""
HEAD_STRATEGY = "attn_head"

_MODULE = "self_attn (KV scales)"
_DEFAULTS = {"symmetric": True, "dynamic": False}  # SGLang's, of a scheme that does not say them
# by what stands before a scale's own name
_PLACES: Mapping[str, KvPlace] = {
    ".attn_mqa": "attn_mqa",
    ".attn": "attn",
    ".k_proj": "k_proj",
    ".v_proj": "k_proj",
    ".qkv_proj": "qkv_proj",
}
_OUTCOMES = {KvUse.IGNORED: Outcome.LOADS, KvUse.REFUSED: Outcome.REFUSED, KvUse.UNKNOWN: Outcome.UNKNOWN}


def scale_of(name: str) -> str:
    """Which scale of which attention module a stored name means: engines have one attribute for all its names."""
    module, _, leaf = name.rpartition(".")
    return f"{module.removesuffix(_suffix(module))}.{leaf}"


def _suffix(module: str) -> str:
    return next((one for one in _PLACES if module.endswith(one)), "")


def kv_scale_verdicts(
    family: Family, config: Config, stored: Mapping[str, TensorSpec], section: Section, engine: EngineName
) -> Iterator[ModuleVerdict]:
    """What becomes of stored KV scales, and of a scheme for them that no scale answers."""
    found = {name: spec for name, spec in stored.items() if name.endswith(SCALE_LEAVES)}
    if section.kv_cache and not found:
        yield _said(Outcome.LOADS, "kv_cache_scheme is declared and no scale is there: 1.0 is taken", None)
    if not found:
        return
    try:
        kinds = _kinds(family, config, found, section)
    except SourceError as error:  # of an unknown architecture: what it caches is not known
        yield _said(Outcome.UNKNOWN, str(error), next(iter(found)))
        return
    lost = {name: why for name, kind in kinds.items() if (why := why_lost(engine, kind)) is not None}
    read = [name for name in found if name not in lost]
    # names that are passed over matter where an engine takes none at all, what ends it matters always
    name = next((one for one in lost if not read or lost[one].use is KvUse.REFUSED), None)
    if name is not None:
        words = f"{engine} does not take these KV scales: {lost[name].why}"
        yield _said(_OUTCOMES[lost[name].use], words, name, "leave the scales out")
    if read:
        yield from _twice(read)
        yield from _of_backends(engine, kinds[read[0]], read[0])


def _kinds(family: Family, config: Config, found: Mapping[str, TensorSpec], section: Section) -> Mapping[str, KvScales]:
    """What names, shapes and config say, by name. Raises SourceError for an architecture whose cache is not known."""
    if family.kv_shape is None:
        raise SourceError(f"what a {family.name} model keeps of a token is not known")
    text = family.text_config(config)
    attention = Attention.of(family.kv_shape(text))
    kinds = {}
    for name, spec in found.items():
        place = _PLACES.get(_suffix(name.rpartition(".")[0]), "")
        scope: KvScope = "head" if spec.num_elements > 1 else "tensor"
        kinds[name] = KvScales(
            family=family.name,
            model_type=str(text.get("model_type") or config.get("model_type")),
            attention=attention,
            spelling="modelopt" if place == "k_proj" else "compressed-tensors",
            scope=scope,
            method=section.method,
            stored_at=place,
            is_declared=_is_declared(section.kv_cache, scope),
        )
    return kinds


def _of_backends(engine: EngineName, kind: KvScales, name: str) -> Iterator[ModuleVerdict]:
    """What is to be kept from where scales are read by their names."""
    bad: dict[str, list[str]] = {}
    for row in kv_use_in(engine, kind):
        if row.use in (KvUse.HARMFUL, KvUse.REFUSED):
            bad.setdefault(row.why, []).append(row.backend)
    for why, backends in bad.items():
        words = ", ".join(backends)
        remedy = f"use another attention backend than {words}, or leave the scales out"
        yield _said(Outcome.FLAG, f"KV scales other than 1 are wrong in {words}: {why}", name, remedy)


def _twice(names: Iterable[str]) -> Iterator[ModuleVerdict]:
    """Of scales that an engine finds under two names."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(scale_of(name), name)
        if other != name:
            message = f"a KV scale has two names here ({other} is the other): which is loaded last is not stated"
            yield _said(Outcome.UNKNOWN, message, name, "keep one of them; quantkit kv-scales says whether they differ")
            return


def _is_declared(scheme: Any, scope: KvScope) -> bool:
    """Whether the config's scheme is one of scales of this scope."""
    wanted = STATIC_KV_SCHEME if scope == "tensor" else {**STATIC_KV_SCHEME, "strategy": HEAD_STRATEGY}
    return isinstance(scheme, Mapping) and {**_DEFAULTS, **scheme}.items() >= wanted.items()


def _said(outcome: Outcome, message: str, tensor: str | None, remedy: str = "") -> ModuleVerdict:
    remedy = "" if outcome is Outcome.LOADS else remedy
    return ModuleVerdict(module=_MODULE, outcome=outcome, message=message, tensor=tensor, remedy=remedy)
