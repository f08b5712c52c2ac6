"""Will it load? What an engine builds from a config, against the tensors that are there.

Three answers for a module: it loads, the engine refuses it (in its own words, in advance), or it loads silently wrong,
which is the worst: a parameter keeps what happened to lie in memory, and the model answers nonsense.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from quantkit.engines.matching import MatchError
from quantkit.engines.runtime import COLUMN, EngineRules, Kind, Member, ModelRules, RuntimeModule
from quantkit.engines.schemes import (
    Part,
    Parts,
    Scheme,
    Section,
    native_fp8_parts,
    plain_parts,
    w4afp8_parts,
)
from quantkit.engines.verdicts import ModuleVerdict, Outcome
from quantkit.tensors import F8_E4M3, TensorSpec

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# how the leaves begin that a weight may be stored as; biases and what belongs to a cache are loaded apart
_OF_A_WEIGHT = ("weight", "input_scale", "qweight", "qzeros", "scales", "g_idx")
# extra tensors without which the codes mean something else
_CHANGES_VALUES = frozenset({"weight_zero_point", "weight_g_idx"})
_REMEDY = "convert again, or correct quantization_config"

Stored = Mapping[str, TensorSpec]  # tensor name to spec
Leaves = Mapping[str, Mapping[str, TensorSpec]]  # module to leaf to spec


def renamed(section: Section, renames: Sequence[tuple[str, str]]) -> Section:
    """The config's entries after the engine's own rewriting: plain ones with a dot, in either engine."""

    def rename(entry: str) -> str:
        for old, new in renames:
            entry = entry.replace(old, new) if "." in entry and not entry.startswith("re:") else entry
        return entry

    targets = {rename(entry): scheme for entry, scheme in section.targets.items()}
    return replace(section, targets=targets, ignore=tuple(rename(entry) for entry in section.ignore))


def leaves_of(stored: Stored) -> dict[str, dict[str, TensorSpec]]:
    """Tensors by module."""
    found: dict[str, dict[str, TensorSpec]] = {}
    for name, spec in stored.items():
        module, _, leaf = name.rpartition(".")
        found.setdefault(module, {})[leaf] = spec
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """One engine and one architecture over one checkpoint; ``leaves``: what is stored, by module."""

    rules: EngineRules
    model: ModelRules
    section: Section
    leaves: Leaves

    def is_stored(self, module: RuntimeModule) -> bool:
        """Whether anything of it is in the files."""
        return any(member.module in self.leaves for member in module.members)

    def verdict(self, module: RuntimeModule) -> ModuleVerdict:
        """What becomes of a module: what the engine refuses can no longer load wrong."""
        section = self._section_of(module)
        spare = all(member.optional for member in module.members) and ".indexer." in module.name
        if spare and self.model.refuses_spare_indexers:
            return ModuleVerdict(
                module=module.name,
                outcome=Outcome.REFUSED,
                message="KeyError: this layer has no indexer of its own, and no parameter wants its tensors",
                tensor=f"{module.members[0].module}.weight",
                remedy="leave the indexers of such layers out",
            )
        try:
            scheme = self.scheme_of(module)
        except MatchError as error:
            return ModuleVerdict(module=module.name, outcome=Outcome.REFUSED, message=str(error), remedy=_REMEDY)
        words = _words(module, scheme, section)
        errors: Iterator[str] = iter(())
        if scheme is not None:
            errors = (
                self.rules.expert_errors(scheme, section)
                if module.kind is Kind.EXPERTS
                else self.rules.linear_errors(module, scheme, section)
            )
        found = [
            ModuleVerdict(module=module.name, outcome=Outcome.REFUSED, scheme=words, message=message, remedy=_REMEDY)
            for message in errors
        ]
        expected: dict[tuple[int, int], Parts] = {}  # experts are alike
        for member in module.members:
            if member.module in self.leaves or not member.optional:
                if member.shape not in expected:
                    expected[member.shape] = _expected(module, member, scheme, section)
                parts = self._decoded(module, member) or expected[member.shape]
                found += self._compare(module, member, parts, words)
        good = ModuleVerdict(module=module.name, outcome=Outcome.LOADS, scheme=words)
        refused = (one for one in found if one.outcome is Outcome.REFUSED)
        return next(refused, found[0] if found else good)

    def _section_of(self, module: RuntimeModule) -> Section:
        return renamed(self.section, self.model.draft_renames) if module.is_draft else self.section

    def scheme_of(self, module: RuntimeModule) -> Scheme | None:
        """The group that a module gets, None where it is not quantized by the config's groups. Raises MatchError."""
        section = self._section_of(module)
        if section.method != "compressed-tensors" or module.kind is Kind.PLAIN:
            return None
        if module.kind is Kind.HEAD:
            return self._head_scheme(module, section)
        if module.kind is Kind.LINEAR:
            if section.has_native_linears:
                return None
            return self._match(module.name, module.class_name, section)
        schemes = {self._match(f"{module.name}.0.{leaf}", module.class_name, section) for leaf in _PROJECTIONS}
        if len(schemes) > 1:
            raise MatchError("All MoE projections need to have same quantization scheme but found multiple")
        return schemes.pop()

    def _match(self, name: str, class_name: str, section: Section) -> Scheme | None:
        matching, packed = self.rules.matching, self.model.packed
        if matching.is_ignored(name, section.ignore, packed):
            return None
        target = matching.find_target(name, class_name, section.targets, packed)
        return None if target is None else section.targets[target]

    def _head_scheme(self, module: RuntimeModule, section: Section) -> Scheme | None:
        """A head is quantized only where a target names it."""
        matching = self.rules.matching
        if matching.is_ignored(module.name, section.ignore, {}):
            return None
        return next((one for target, one in section.targets.items() if matching.is_hit(module.name, [target])), None)

    def _decoded(self, module: RuntimeModule, member: Member) -> Parts | None:
        """Of an FP8 key of the indexer, which both loaders decode into its fused BF16 module, under either name."""
        stored = self.leaves.get(member.module, {})
        is_key = module.kind is Kind.PLAIN and member.module.endswith(".indexer.wk")
        if not is_key or "weight" not in stored or stored["weight"].dtype != F8_E4M3:
            return None
        parts = native_fp8_parts(*member.shape)
        name = "weight_scale" if "weight_scale" in stored else "weight_scale_inv"
        return {"weight": parts["weight"], name: parts["weight_scale_inv"]}

    def _compare(self, module: RuntimeModule, member: Member, expected: Parts, words: str) -> Iterator[ModuleVerdict]:
        """What is stored of one module of the checkpoint against what its parameters want."""

        def wrong(outcome: Outcome, leaf: str, message: str) -> ModuleVerdict:
            return ModuleVerdict(
                module=module.name,
                outcome=outcome,
                scheme=words,
                message=message,
                tensor=f"{member.module}.{leaf}",
                remedy=_REMEDY,
            )

        stored = self.leaves.get(member.module, {})
        for leaf in stored:
            if leaf in expected or not leaf.startswith(_OF_A_WEIGHT):
                continue
            if self.model.refuses_unknown(f"{member.module}.{leaf}"):
                yield wrong(Outcome.REFUSED, leaf, f"KeyError: no parameter wants this tensor, as {words}")
            elif leaf in _CHANGES_VALUES:
                yield wrong(Outcome.SILENT, leaf, f"is passed over, as {words}: the codes then mean something else")
        for leaf, part in expected.items():
            spec = stored.get(leaf)
            if spec is None:
                if not part.optional:
                    yield wrong(Outcome.SILENT, leaf, f"is missing, as {words}: the parameter is never filled")
                continue
            yield from (wrong(outcome, leaf, text) for outcome, text in self._mismatches(module, spec, part))

    def _mismatches(self, module: RuntimeModule, spec: TensorSpec, part: Part) -> Iterator[tuple[Outcome, str]]:
        if spec.dtype not in part.dtypes:
            wanted = " or ".join(dtype.name for dtype in part.dtypes)
            is_narrowed = F8_E4M3 in part.dtypes and module.class_name == COLUMN and self.rules.name == "sglang"
            if is_narrowed:
                yield Outcome.REFUSED, f"ValueError: Downcasting not allowed: {spec.dtype.name} into {wanted}"
            else:
                yield Outcome.SILENT, f"is {spec.dtype.name} and is cast to {wanted} without a word"
        elif part.shape is not None and spec.shape not in (part.shape, () if part.shape == (1,) else part.shape):
            yield Outcome.REFUSED, f"is {list(spec.shape)}, and the parameter is {list(part.shape)}: the copy fails"


def _expected(module: RuntimeModule, member: Member, scheme: Scheme | None, section: Section) -> Parts:
    rows, cols = member.shape
    if scheme is not None:
        return scheme.parts(rows, cols)
    if section.method == "w4afp8" and module.kind is Kind.EXPERTS:
        return w4afp8_parts(rows, cols)
    if module.kind is Kind.LINEAR and (section.method == "w4afp8" or section.has_native_linears):
        return native_fp8_parts(rows, cols)
    return plain_parts(rows, cols)


def _words(module: RuntimeModule, scheme: Scheme | None, section: Section) -> str:
    if scheme is not None:
        return str(scheme)
    if section.method == "w4afp8" and module.kind is Kind.EXPERTS:
        return "INT4 in groups of 128, w4afp8"
    is_native = section.method == "w4afp8" or section.has_native_linears
    return "FP8 in blocks of 128" if module.kind is Kind.LINEAR and is_native else "not quantized"
