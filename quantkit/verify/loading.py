"""Will the engines load it? Their contract over a plan, or over a directory that may be another tool's."""

from collections.abc import Iterator, Mapping, Sequence

from quantkit.checkpoint.file_names import CONFIG_NAME
from quantkit.checkpoint.source import Checkpoint
from quantkit.engines.check import check_engine
from quantkit.engines.launch import Launch
from quantkit.engines.parallel import ENGINES, EngineName
from quantkit.engines.verdicts import EngineReport, Outcome
from quantkit.errors import VerificationError
from quantkit.families import FAMILIES, Family
from quantkit.plan.plan import Plan
from quantkit.recipe import Recipe
from quantkit.recipe_settings import forms_of
from quantkit.tensors import TensorSpec
from quantkit.verify.report import Finding
from quantkit.weights.completeness import root_of_names

_CHECK = "engine"


def check_loading(checkpoint: Checkpoint, family: Family, launch: Launch) -> EngineReport:
    """Of a catalogue: no tensor is read."""
    stored = {name: tensor.spec for name, tensor in checkpoint.tensors.items()}
    return check_engine(family, checkpoint.config, stored, launch, root=root_of_names(stored))


def check_plan(plan: Plan, launches: Sequence[Launch]) -> tuple[EngineReport, ...]:
    """Of what a plan will write; nothing is said of a part of a model."""
    if plan.partial is not None or plan.is_incomplete:
        return ()
    stored: Mapping[str, TensorSpec] = {name: spec for shard in plan.shards for name, spec in shard.specs.items()}
    root, family = root_of_names(stored), FAMILIES[plan.family]
    return tuple(check_engine(family, plan.config, stored, launch, root=root) for launch in launches)


def launches_of(recipe: Recipe) -> tuple[Launch, ...]:
    """The engines of the recipe, or all where it names none; with the flags that its lines give."""
    names: tuple[EngineName, ...] = tuple(recipe.engines) or ENGINES
    return tuple(Launch(engine=name, flags=tuple(" ".join(recipe.engines.get(name, ())).split())) for name in names)


def refuse_unservable(plan: Plan, reports: Sequence[EngineReport]) -> None:
    """Raise VerificationError where an engine of the recipe cannot load the output; where it names none: no engine."""
    bad = [report for report in reports if report.bad_rows]
    if not bad or (not plan.recipe.engines and len(bad) < len(reports)):
        return
    row = bad[0].bad_rows[0]
    raise VerificationError(
        f"{bad[0].engine} {bad[0].version}: {row.name}: {row.example.message} ({row.example.outcome.value})",
        tensor=row.example.tensor,
        remedy=_remedy(plan.recipe, bad[0].engine),
    )


def _remedy(recipe: Recipe, engine: EngineName) -> str:
    """What the command can change; a form of another engine first."""
    for form in forms_of(recipe.model_dump()):
        if form.engine not in (None, engine):
            return f"leave {form.option} out, or serve it with {form.engine} (--engine {form.engine})"
    named = "name another engine" if len(recipe.engines) == 1 else "name the engine that will serve it"
    return f"{named} with --engine, change recipe {recipe.name}, or pass --allow-unservable"


def loading_findings(report: EngineReport) -> Iterator[Finding]:
    """Of what does not simply load, worst first."""
    for row in report.rows:
        one = row.example
        if one.outcome is Outcome.LOADS:
            continue
        yield Finding(
            check=_CHECK,
            message=f"{report.engine} {report.version}: {row.name} ({row.num_modules}): {one.outcome.value}: "
            f"{one.message}",
            is_error=one.outcome in (Outcome.SILENT, Outcome.REFUSED),
            tensor=one.tensor,
            file=None if one.tensor else CONFIG_NAME,
            remedy=one.remedy,
        )
