"""From the options of `convert` to what it makes: checks, the plan, and a dry run, a rank's share or the whole."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.checkpoint.file_names import MANIFEST_NAME
from quantkit.checkpoint.output import check_target
from quantkit.cli import calibrated, render
from quantkit.cli.convert_options import SmokeOptions, WorkOptions
from quantkit.cli.fetching import check_kept
from quantkit.cli.options import check_engine_name, spool_bytes
from quantkit.cli.planning import PlanRequest, check_servable, describe, engine_reports, plan_request, plan_resolved
from quantkit.cli.recipe_options import RecipeOptions
from quantkit.cli.show_plan import show_plan
from quantkit.cli.show_results import show_conversion, show_rank
from quantkit.convert.conversion import Conversion, Executor
from quantkit.convert.convert import ConvertReport, convert_checkpoint
from quantkit.convert.publish import PublishReport, PushTarget, already_made, check_push, prepare, publish_output
from quantkit.convert.ranks import convert_share, finalize
from quantkit.engines.verdicts import EngineReport
from quantkit.errors import not_installed
from quantkit.plan.plan import Plan
from quantkit.plan.resources import Workers
from quantkit.sources import ResolvedSource, fetch_source
from quantkit.threads import ReportProgress

if TYPE_CHECKING:
    from quantkit.streaming import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertRequest:
    """What the command line asked for. ``is_dry``: nothing is made."""

    source: str
    output: Path | None
    options: RecipeOptions
    work: WorkOptions
    smoke: SmokeOptions
    inputs: calibrated.Inputs
    is_dry: bool

    @property
    def push_target(self) -> PushTarget | None:
        hub_id = self.work.push_to
        return None if hub_id is None else PushTarget(hub_id=hub_id, is_public=self.work.public)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """How it is told."""

    quiet: bool
    as_json: bool
    summary: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """What has passed all checks; nothing is made yet."""

    resolved: ResolvedSource
    plan: Plan
    loading: tuple[EngineReport, ...]
    num_jobs: int


def show_dry_run(request: ConvertRequest, shown: Shown) -> None:
    """The plan, as `quantkit plan` shows it."""
    planned = _planned(request)
    if request.push_target is not None:
        check_push(request.push_target)
    workers = Workers(num_jobs=planned.num_jobs, device=request.work.device)
    described = describe(planned.resolved, planned.plan, planned.loading, workers, streaming=request.inputs.streaming)
    show_plan(described, as_json=shown.as_json, summary=shown.summary)


def show_share(request: ConvertRequest, shown: Shown) -> None:
    """Make what is a rank's."""
    planned = _planned(request)
    with render.progress(is_quiet=shown.quiet) as advance:
        report = convert_share(_conversion(request, planned, advance))
    show_rank(report, as_json=shown.as_json, summary=shown.summary)


def show_converted(request: ConvertRequest, shown: Shown) -> None:
    """Make the output, or find that it is there, and publish it where that is asked for."""
    planned = _planned(request)
    plan, tokens = calibrated.with_inputs(planned.resolved, planned.plan, request.inputs)
    planned = replace(planned, plan=plan)
    with render.progress(is_quiet=shown.quiet) as advance:
        conversion = _conversion(request, planned, advance)
        there = _already_there(request, conversion)
        cluster = _cluster(request.work)
        report = there or _convert(request, conversion, tokens, cluster)
    published = _publish(request, planned, is_quiet=shown.quiet)
    show_conversion(report, published, is_new=there is None, as_json=shown.as_json, summary=shown.summary)


def _planned(request: ConvertRequest) -> _Planned:
    """Check the options, plan, check what they mean for this source, and fetch what is to be kept of it.

    Raises before anything is fetched or made.
    """
    work, options = request.work, request.options
    limits = request.smoke.limits(work)
    check_engine_name(options.engine)
    work.check(is_limited=limits is not None, is_dry=request.is_dry)
    num_jobs = work.num_jobs()
    _check_output(request, request.output)
    planning = PlanRequest(
        source=_absolute(request.source) if work.is_ray else request.source,
        options=options,
        keep_source=work.keep_source and not request.is_dry,
        limits=limits,
    )
    resolved, plan = plan_request(planning)
    method = plan.recipe.method
    request.inputs.check(method, is_alone=work.is_alone, is_limited=limits is not None, is_dry=request.is_dry)
    loading = engine_reports(plan)
    check_servable(plan, loading, is_allowed=options.allow_unservable)
    if not request.is_dry:
        if method != "search":
            check_kept(resolved, f"--method {method}", keep_source=work.keep_source)
            request.inputs.check_files(resolved)
        if work.keep_source and resolved.repository is not None:
            _check_output(request, request.output or _default_output(resolved))
            _cluster(work)
            resolved = fetch_source(resolved)
            plan = plan_resolved(planning, resolved)
    return _Planned(resolved=resolved, plan=plan, loading=loading, num_jobs=num_jobs)


def _check_output(request: ConvertRequest, output: Path | None) -> None:
    """Raise UsageError where it cannot be made; one that is there may be what is asked for."""
    source = Path(request.source)
    if output is None:
        return
    if (request.work.push_to or request.work.accept_complete) and (output / MANIFEST_NAME).is_file():
        return
    check_target(output, source if request.source and source.is_dir() else None)


def _absolute(source: str) -> str:
    """Other machines begin elsewhere."""
    return str(Path(source).resolve()) if Path(source).is_dir() else source


def _target(request: ConvertRequest, planned: _Planned) -> Path:
    return request.output or _default_output(planned.resolved)


def _default_output(resolved: ResolvedSource) -> Path:
    return Path(f"{resolved.name}-int4")


def _conversion(request: ConvertRequest, planned: _Planned, report_progress: ReportProgress) -> Conversion:
    work, target = request.work, _target(request, planned)
    return Conversion(
        plan=planned.plan,
        target=target.resolve() if work.is_ray else target,
        num_jobs=planned.num_jobs,
        device=work.device,
        provenance=planned.resolved.provenance,
        repository=planned.resolved.repository,
        spool_bytes=spool_bytes(work.spool_gib),
        resume=work.resume,
        rank=work.rank,
        world_size=work.world_size or 1,
        report_progress=report_progress,
    )


def _already_there(request: ConvertRequest, conversion: Conversion) -> ConvertReport | None:
    """What is to be published may be there; else only where that was said to be fine."""
    if request.push_target is not None:
        return prepare(conversion, request.push_target)
    return already_made(conversion) if request.work.accept_complete else None


def _cluster(work: WorkOptions) -> Executor | None:
    if not work.is_ray:
        return None
    try:
        from quantkit.convert.ray_executor import RayExecutor
    except ImportError as error:
        raise not_installed("--executor ray", "ray", extra="ray") from error
    return RayExecutor(address=work.ray_address or "auto")


def _convert(
    request: ConvertRequest, conversion: Conversion, tokens: "Tokens | None", cluster: Executor | None
) -> ConvertReport:
    if request.work.finalize:
        return finalize(conversion)
    if tokens is None:
        return convert_checkpoint(conversion, cluster)
    from quantkit.calibrated.convert import convert_calibrated

    return convert_calibrated(conversion, tokens)


def _publish(request: ConvertRequest, planned: _Planned, *, is_quiet: bool) -> PublishReport | None:
    push_target, target = request.push_target, _target(request, planned)
    if push_target is None:
        return None
    if not is_quiet:
        render.show_notes("upload", [f"{target} to {push_target.hub_id}"])
    with render.progress(is_quiet=is_quiet) as advance:
        return publish_output(
            target,
            push_target,
            num_jobs=planned.num_jobs,
            shows_bars=not is_quiet and sys.stderr.isatty(),
            report_progress=advance,
        )
