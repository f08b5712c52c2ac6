"""`quantkit convert`: the main job."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli import calibrated, running
from quantkit.cli import options as opt
from quantkit.errors import UsageError

if TYPE_CHECKING:
    from quantkit.convert.conversion import Conversion, Executor
    from quantkit.convert.convert import ConvertReport
    from quantkit.convert.publish import PublishReport, PushTarget
    from quantkit.streaming import Tokens


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("convert")(convert)


def convert(
    source: opt.SourceArgument,
    to: opt.ToOption = None,
    output: opt.OutputOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only plan: the same as `quantkit plan`.")] = False,
    recipe: opt.RecipeOption = None,
    group_size: opt.GroupSizeOption = None,
    method: calibrated.MethodOption = None,
    scales: opt.ScalesOption = None,
    signed_scales: opt.SignedOption = None,
    zero_points: opt.ZeroPointsOption = None,
    format_: opt.FormatOption = None,
    activations: opt.ActivationsOption = None,
    stats: opt.StatsOption = None,
    importance: opt.ImportanceOption = None,
    rest: opt.RestOption = None,
    mtp: opt.MtpOption = None,
    targets: opt.TargetsOption = None,
    ignore: opt.IgnoreOption = None,
    allow_unmatched: opt.AllowUnmatchedOption = False,
    allow_incomplete: opt.AllowIncompleteOption = False,
    engine: opt.ServingEngineOption = None,
    allow_unservable: opt.AllowUnservableOption = False,
    spool_gib: opt.SpoolOption = None,
    keep_source: opt.KeepSourceOption = False,
    resume: opt.ResumeOption = True,
    accept_complete: opt.AcceptCompleteOption = False,
    rank: opt.RankOption = None,
    world_size: opt.WorldSizeOption = None,
    finalize: opt.FinalizeOption = False,
    max_memory: opt.MaxMemoryOption = None,
    executor: opt.ExecutorOption = "local",
    ray_address: opt.RayAddressOption = None,
    push_to: opt.PushToOption = None,
    public: opt.PublicOption = False,
    jobs: opt.JobsOption = None,
    device: opt.DeviceOption = "cpu",
    quiet: opt.QuietOption = False,
    as_json: opt.JsonOption = False,
    limit_shards: opt.LimitShardsOption = None,
    layers: opt.LayersOption = None,
    summary: opt.SummaryOption = None,
    text: running.TextOption = None,
    tokens: running.TokensOption = None,
    length: running.LengthOption = None,
    sequences: running.SequencesOption = None,
    streaming: calibrated.StreamingOption = False,
) -> None:
    """Convert a checkpoint to INT4: plan, write, verify, put in place.

    The output directory appears whole or not at all. A run that was stopped goes on with the same command. Shards of a
    hub repository pass through a bounded spool. With --push-to the finished output is uploaded; where it is complete
    already, the same command goes on with the upload. A smoke run (--limit-shards, --layers) is planned and checked
    whole, marked as partial, and never published. With --method gptq or awq the model is run over --text or --tokens
    first, and what that chose lies in OUTPUT.words until the output is there.

    Example: quantkit convert ./GLM-5.2-FP8 --to int4 -o ./glm-5.2-int4
    """
    opt.check_to(to)
    from quantkit.checkpoint.file_names import MANIFEST_NAME
    from quantkit.checkpoint.output import check_target
    from quantkit.cli import render
    from quantkit.cli.planning import PlanRequest, check_servable, engine_reports, plan_request, tensor_parallel
    from quantkit.cli.show_plan import show_plan
    from quantkit.cli.show_results import show_conversion, show_rank
    from quantkit.convert.conversion import Conversion
    from quantkit.convert.publish import PushTarget, already_made, check_push, prepare
    from quantkit.convert.ranks import convert_share
    from quantkit.convert.ranks import finalize as finalize_ranks
    from quantkit.plan.limits import Limits
    from quantkit.plan.resources import Workers, choose_jobs

    first_shards, few_layers = opt.check_limits(limit_shards=limit_shards, layers=layers, rank=rank, finalize=finalize)
    is_limited = first_shards is not None or few_layers is not None
    request = PlanRequest(
        source=_absolute(source) if executor == "ray" else source,
        recipe=recipe,
        settings={
            "group_size": group_size,
            "method": method,
            "scales": scales,
            "signed_scales": signed_scales,
            "zero_points": zero_points,
            "layout": format_,
            "activations": activations,
            "rest": rest,
            "mtp": mtp,
        },
        stats=stats,
        importance=importance,
        engine=opt.check_engine_name(engine),
        targets=targets or (),
        ignore=ignore or (),
        allow_unmatched=allow_unmatched,
        allow_incomplete=allow_incomplete,
        headers_only=dry_run or not (keep_source or calibrated.runs_model(method)),
        limits=Limits(num_shards=first_shards, layers=few_layers) if is_limited else None,
    )
    opt.check_executor(
        executor, ray_address=ray_address, is_shared=rank is not None or finalize, jobs=jobs, max_memory=max_memory
    )
    opt.check_device(device, executor=executor, finalize=finalize, dry_run=dry_run)
    opt.check_pushing(push_to=push_to, public=public, rank=rank, is_limited=is_limited)
    opt.check_sharing(rank=rank, world_size=world_size, finalize=finalize, resume=resume)
    # nodes of a cluster choose for themselves
    num_jobs = 1 if executor == "ray" else choose_jobs(jobs, opt.check_memory(max_memory), device=device)
    if output is not None and not ((push_to or accept_complete) and (output / MANIFEST_NAME).is_file()):
        check_target(output, Path(source) if source and Path(source).is_dir() else None)  # before anything is fetched
    resolved, made = plan_request(request)
    inputs = calibrated.Inputs(
        tokens=running.TokenOptions(text=text, tokens=tokens, length=length, sequences=sequences), streaming=streaming
    )
    is_shared = rank is not None or finalize or executor != "local"
    inputs.check(made.recipe.method, is_alone=not is_shared, is_limited=is_limited, is_dry=dry_run)
    loading = engine_reports(made)
    check_servable(made, loading, is_allowed=allow_unservable)
    pushed_to = None if push_to is None else PushTarget(hub_id=push_to, is_public=public)
    if dry_run:
        if pushed_to is not None:
            check_push(pushed_to)
        workers = Workers(num_jobs=num_jobs, device=device)
        show_plan(made, tensor_parallel(resolved, made), loading, workers, as_json=as_json, summary=summary)
        return
    target = output or Path(f"{resolved.name}-int4")
    made, seen = calibrated.with_inputs(resolved, made, inputs)
    with render.progress(is_quiet=quiet) as advance:
        conversion = Conversion(
            plan=made,
            target=target.resolve() if executor == "ray" else target,
            num_jobs=num_jobs,
            device=device,
            provenance=resolved.provenance,
            repository=resolved.repository,
            spool_bytes=opt.spool_bytes(spool_gib),
            resume=resume,
            rank=rank,
            world_size=world_size or 1,
            report_progress=advance,
        )
        if rank is not None:
            share = convert_share(conversion)
        else:
            there = (
                prepare(conversion, pushed_to) if pushed_to else already_made(conversion) if accept_complete else None
            )
            cluster = _ray(ray_address) if executor == "ray" else None
            report = there or (finalize_ranks(conversion) if finalize else _convert(conversion, seen, cluster))
    if rank is not None:
        show_rank(share, as_json=as_json, summary=summary)
        return
    published = None if pushed_to is None else _upload(target, pushed_to, num_jobs=num_jobs, quiet=quiet)
    show_conversion(report, published, is_new=there is None, as_json=as_json, summary=summary)


def _absolute(source: str) -> str:
    """Other machines begin elsewhere."""
    return str(Path(source).resolve()) if Path(source).is_dir() else source


def _convert(conversion: "Conversion", seen: "Tokens | None", cluster: "Executor | None") -> "ConvertReport":
    if seen is not None:
        from quantkit.calibrated.convert import convert_calibrated

        return convert_calibrated(conversion, seen)
    from quantkit.convert.convert import convert_checkpoint

    return convert_checkpoint(conversion, cluster)


def _upload(target: Path, pushed_to: "PushTarget", *, num_jobs: int, quiet: bool) -> "PublishReport":
    from quantkit.cli import render
    from quantkit.convert.publish import publish_output

    if not quiet:
        render.show_notes("upload", [f"{target} to {pushed_to.hub_id}"])
    with render.progress(is_quiet=quiet) as advance:
        return publish_output(
            target,
            pushed_to,
            num_jobs=num_jobs,
            shows_bars=not quiet and sys.stderr.isatty(),
            report_progress=advance,
        )


def _ray(address: str | None) -> "Executor":
    try:
        from quantkit.convert.ray_executor import RayExecutor
    except ImportError as error:
        raise UsageError("Ray is not installed here", remedy="pip install 'ray>=2.40'") from error
    return RayExecutor(address=address or "auto")
