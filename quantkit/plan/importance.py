"""Which weights of a plan a file of second moments covers, how well, and what it says besides."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from quantkit.errors import RecipeError, SourceError
from quantkit.importance.cover import Cover, Importance
from quantkit.importance.file import Entry, ImportanceFile
from quantkit.importance.names import Place, places_of
from quantkit.module_names import expert_of
from quantkit.numerics.shrinkage import PRIOR_TOKENS
from quantkit.plan.plan import Action, Job, Plan
from quantkit.plan.same_model import check_model
from quantkit.weights.binding import Binding
from quantkit.weights.completeness import text_root
from quantkit.weights.weight import Weight


def with_importance(plan: Plan, file: ImportanceFile) -> Plan:
    """The plan with a search that is weighted by the file.

    Raises RecipeError where nothing is searched, SourceError where the file is of another model, as its fingerprint,
    its shapes or its names tell.
    """
    if plan.recipe.scales != "search":
        raise RecipeError(
            f"importance weights the search of scales, and scales are {plan.recipe.scales}",
            remedy="leave --importance or --scales out",
        )
    if plan.recipe.method != "search":
        raise RecipeError(
            f"importance weights the search alone, and --method {plan.recipe.method} gathers moments of its own",
            remedy="leave --importance or --method out",
        )
    jobs = [job for job in plan.jobs if job.action is Action.INT4]
    if not jobs:
        raise RecipeError("nothing becomes INT4 here that importance could weight", remedy="leave --importance out")
    weights = {job.weight.name: job.weight for job in plan.jobs}
    warnings = () if file.model is None else check_model(plan, file.model, file.path)
    places = _places(file, weights)
    _check_shapes(file, weights, places, is_incomplete=plan.is_incomplete)
    made = _importance(file, jobs, places)
    if made.count(Cover.NONE) == made.num_weights:
        raise SourceError(
            f"covers none of the {made.num_weights} weights that become INT4 (it speaks of "
            f"{next(iter(file.entries), 'nothing')})",
            file=file.path,
            remedy="give a file of this model",
        )
    return replace(plan, importance=made, warnings=(*plan.warnings, *warnings, *_warnings(made)))


def _places(file: ImportanceFile, weights: Mapping[str, Weight]) -> dict[str, Place]:
    """Of all matrices that have an entry."""
    root = text_root(Binding(weights=weights, dropped={}))
    places = {}
    for name, weight in weights.items():
        if weight.is_matrix:
            found = places_of(weight.module, kind=file.kind, root=root)
            place = next((one for one in found if one.entry in file.entries), None)
            if place is not None:
                places[name] = place
    return places


def _check_shapes(
    file: ImportanceFile, weights: Mapping[str, Weight], places: Mapping[str, Place], *, is_incomplete: bool
) -> None:
    """Raise SourceError for an entry of other channels or experts than the weights that it is for."""
    num_experts: Counter[str] = Counter()
    for place in places.values():
        num_experts[place.entry] = max(num_experts[place.entry], (place.expert or 0) + 1)
    for name, place in places.items():
        entry, num_cols, num_rows = file.entries[place.entry], weights[name].num_cols, num_experts[place.entry]
        has_all = entry.num_values == num_cols * num_rows or (is_incomplete and entry.num_values % num_cols == 0)
        tokens, shape = len(entry.tokens or (0,)), entry.values.spec.shape
        is_turned = len(shape) > 1 and shape[-1] != num_cols
        is_short = entry.num_values < num_cols * num_rows
        if not has_all or is_turned or is_short or tokens not in (1, entry.num_values // num_cols):
            raise SourceError(
                f"holds {' x '.join(map(str, shape))} moments with {tokens} counts, but {name} needs "
                f"{num_rows} x {num_cols}",
                tensor=entry.values.name,
                file=file.path,
                remedy="give a file of this model",
            )


def _importance(file: ImportanceFile, jobs: list[Job], places: Mapping[str, Place]) -> Importance:
    layers = _Layers(file)
    cover: dict[str, Counter[Cover]] = defaultdict(Counter)
    missing: Counter[str] = Counter()
    kept = {}
    for job in jobs:
        weight = job.weight
        place = places.get(weight.name)
        how = Cover.NONE if place is None else layers.cover(place, weight.num_cols)
        cover[job.role.value][how] += 1
        if how is Cover.NONE:
            missing[_of_any_expert(weight.module)] += 1
        elif place is not None:
            kept[weight.name] = place
    used = {place.entry for place in places.values()}
    unused = tuple(sorted(name for name in file.entries if name not in used))
    return Importance(file=file, places=kept, cover=dict(cover), missing=dict(missing), unused=unused)


def _of_any_expert(module: str) -> str:
    expert = expert_of(module)
    return module if expert is None or expert.number is None else f"{expert.experts}.*.{expert.rest}"


class _Layers:
    """Tokens of every entry's rows, looked up once: none, where their moments are all 0 and so say nothing."""

    def __init__(self, file: ImportanceFile) -> None:
        self._file = file
        self._tokens: dict[str, list[int | None]] = {}

    def cover(self, place: Place, num_cols: int) -> Cover:
        tokens = self._tokens_of(place.entry, num_cols)
        own = tokens[place.expert or 0]
        if own == 0:
            return Cover.LAYER if place.expert is not None and any(one != 0 for one in tokens) else Cover.NONE
        is_rare = place.expert is not None and own is not None and own < PRIOR_TOKENS
        return Cover.RARE if is_rare else Cover.OWN

    def _tokens_of(self, name: str, num_cols: int) -> list[int | None]:
        if name not in self._tokens:
            entry: Entry = self._file.entries[name]
            rows = range(entry.num_values // num_cols)
            tokens = {row: entry.tokens_of(row, num_cols) for row in rows}
            self._tokens[name] = [0 if one == 0 or entry.is_zero(row, num_cols) else one for row, one in tokens.items()]
        return self._tokens[name]


def _warnings(importance: Importance) -> Iterator[str]:
    num_missing = importance.count(Cover.NONE)
    if num_missing:
        name, _ = next(iter(importance.missing.items()))
        yield (
            f"importance: {num_missing} of {importance.num_weights} weights have no moments ({name}"
            f"{', ...' if len(importance.missing) > 1 else ''}) and are searched as without a file"
        )
    num_rare = importance.count(Cover.RARE) + importance.count(Cover.LAYER)
    if num_rare:
        yield (
            f"importance: {num_rare} of {importance.num_weights} weights saw fewer than {PRIOR_TOKENS} tokens: the "
            "average of their layer counts for more than their own moments"
        )
    if importance.unused:
        yield (
            f"importance: {len(importance.unused)} entries of the file are of no weight here "
            f"({', '.join(importance.unused[:3])}{', ...' if len(importance.unused) > 3 else ''})"
        )
