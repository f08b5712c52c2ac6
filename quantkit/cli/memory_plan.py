"""`quantkit memory-plan`: what fits on each rank, before anything is loaded."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from quantkit.cli import memory_options as mem
from quantkit.cli import options as opt


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("memory-plan")(memory_plan)


def memory_plan(
    model: mem.ModelArgument = None,
    scheme: mem.SchemeOption = None,
    group_size: mem.GroupSizeOption = None,
    rest: mem.RestOption = None,
    compare: mem.CompareOption = None,
    tp: mem.TpOption = None,
    ep: mem.EpOption = None,
    pp: mem.PpOption = None,
    dp_attention: mem.DpAttentionOption = None,
    dcp: mem.DcpOption = None,
    gpu: mem.GpuOption = None,
    gpu_gib: mem.GpuGibOption = None,
    engine: mem.EngineOption = None,
    role: mem.RoleOption = None,
    mem_fraction_static: mem.MemFractionOption = None,
    gpu_memory_utilization: mem.UtilizationOption = None,
    kv_dtype: mem.KvDtypeOption = None,
    kv_layout: mem.KvLayoutOption = None,
    with_mtp: mem.MtpOption = False,
    enforce_eager: mem.EagerOption = False,
    context: mem.ContextOption = None,
    context_at_most: mem.ContextAtMostOption = None,
    concurrency: mem.ConcurrencyOption = None,
    max_running_requests: mem.MaxRequestsOption = None,
    check: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--check", metavar="LOG", help="Compare with the start-up log of an engine; it tells the flags."),
    ] = None,
    html: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--html", metavar="FILE", help="Write the plan as one HTML page, too."),
    ] = None,
    allow_overcommit: mem.OvercommitOption = False,
    as_json: opt.JsonOption = False,
    summary: opt.SummaryOption = None,
) -> None:
    """Say what fits on each rank: weights by part, KV pool and tokens, overhead, verdict. Exit 5 if it does not fit.

    MODEL is a recipe, a hub id, a config.json or a checkpoint directory; without it the checkpoint in this directory,
    and where there is none an overview of every recipe.

    Example: quantkit memory-plan glm-5.2 --to int4 --tp 8 --gpu h200 --kv-dtype fp8
    """
    from quantkit.cli.memory_request import MemoryOptions, in_lower_case
    from quantkit.cli.show_memory import MemoryOutput, show_memory

    options = MemoryOptions(
        scheme=scheme,
        group_size=group_size,
        rest=rest,
        tp=tp,
        ep=ep,
        pp=pp,
        dp_attention=dp_attention,
        dcp=dcp,
        gpu=gpu,
        gpu_gib=gpu_gib,
        engine=engine,
        role=role,
        mem_fraction_static=mem_fraction_static,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_dtype=kv_dtype,
        kv_layout=kv_layout,
        with_mtp=with_mtp,
        enforce_eager=enforce_eager,
        context=context,
        context_at_most=context_at_most,
        concurrency=concurrency,
        max_running_requests=max_running_requests,
    )
    output = MemoryOutput(html=html, as_json=as_json, allow_overcommit=allow_overcommit, summary=summary)
    show_memory(model, in_lower_case(options), output, compare=compare, check=check)
