"""How an engine finds the scheme of a module: by entries of a config that hit its name, its class or its parts.

A fused module has a name that no checkpoint contains: its parts are looked at too, in an order that differs between
engines. Read in source and compared with the engines' own code: SGLang 0.5.23, vLLM 0.33.0.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from quantkit.patterns import is_matched

Packed = Mapping[str, tuple[str, ...]]  # leaf of a fused module to the leaves that it is made of


class MatchError(Exception):
    """What the engine itself would raise, in its own words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """The differences between the engines.

    ``ignores_suffixes``: an ignore entry also hits names that end with it after a dot. ``shards_alone``: a fused module
    is ignored by its parts, and its own name counts only where it is listed literally. ``class_before_shards``: the
    order of targets. ``refuses_unmatched``: else such a module is not quantized. ``expert_classes`` get the scheme of
    the target ``Linear``.
    """

    engine: str
    ignores_suffixes: bool
    shards_alone: bool
    class_before_shards: bool
    refuses_unmatched: bool
    expert_classes: tuple[str, ...]

    def is_ignored(self, name: str, entries: Sequence[str], packed: Packed) -> bool:
        """Whether the list keeps a module unquantized. Raises MatchError where the parts of a fused one disagree."""
        if not self.shards_alone and self.is_hit(name, entries):
            return True
        shards = _shards(name, packed)
        if shards is None or name in entries:
            return self.is_hit(name, entries)
        hits = {self.is_hit(shard, entries) for shard in shards}
        if len(hits) > 1:
            parts = ", ".join(name.rpartition(".")[2] for name in shards)
            raise MatchError(
                f"Found different quantization schemes for the shards {parts} of {name}: {self.engine} wants one scheme"
            )
        return hits.pop()

    def find_target(self, name: str, class_name: str, targets: Iterable[str], packed: Packed) -> str | None:
        """The first target that hits, step by step; None where none does. Raises MatchError where that is an error."""
        listed = self._with_expert_classes(targets)
        steps = [_by_name(name, listed)]
        by_class, by_shards = _by_class(class_name, listed), _by_shards(name, listed, packed)
        steps += [by_class, by_shards] if self.class_before_shards else [by_shards, by_class]
        found = next((target for step in steps for target in step), None)
        if found is None and self.refuses_unmatched:
            raise MatchError(f"Unable to find matching target for {name} in the compressed-tensors config.")
        return "Linear" if found in self.expert_classes and found not in targets else found

    def _with_expert_classes(self, targets: Iterable[str]) -> list[str]:
        listed = list(targets)
        if "Linear" in listed and self.expert_classes[0] not in listed:
            listed += self.expert_classes
        return listed

    def is_hit(self, name: str, entries: Iterable[str]) -> bool:
        """Whether any entry hits a name as it stands, as ignore lists and heads are matched."""
        return any(
            is_matched(entry, name) or (self.ignores_suffixes and not _is_pattern(entry) and name.endswith(f".{entry}"))
            for entry in entries
        )


SGLANG_MATCHING = Matching(
    engine="SGLang",
    ignores_suffixes=True,
    shards_alone=True,
    class_before_shards=True,
    refuses_unmatched=True,
    expert_classes=("FusedMoE", "DeepEPMoE"),
)
VLLM_MATCHING = Matching(
    engine="vLLM",
    ignores_suffixes=False,
    shards_alone=False,
    class_before_shards=False,
    refuses_unmatched=False,
    expert_classes=("RoutedExperts",),
)


def _is_pattern(entry: str) -> bool:
    return entry.startswith("re:")


def _shards(name: str, packed: Packed) -> list[str] | None:
    """The names of a fused module's parts, as engines make them: the leaf is replaced wherever it stands."""
    leaf = name.rpartition(".")[2]
    return [name.replace(leaf, part) for part in packed[leaf]] if leaf in packed else None


def _by_name(name: str, targets: Iterable[str]) -> Iterator[str]:
    return (target for target in targets if is_matched(target, name))


def _by_class(class_name: str, targets: Iterable[str]) -> Iterator[str]:
    """A target is contained in the name of the class, in any case; a pattern matches it from the start."""
    for target in targets:
        if re.match(target[3:], class_name) if _is_pattern(target) else target.lower() in class_name.lower():
            yield target


def _by_shards(name: str, targets: Sequence[str], packed: Packed) -> Iterator[str]:
    """The target of the first part, where every part has one."""
    key = next((key for key in packed if name.endswith(key)), None)
    if key is None:
        return
    found = [next(_by_name(name.replace(key, part), targets), None) for part in packed[key]]
    if all(target is not None for target in found):
        yield from (target for target in found[:1] if target is not None)
