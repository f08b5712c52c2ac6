"""`quantkit serve-plan`: complete launch lines of a deployment, checked against contract and memory plan."""

import typer

from quantkit.cli import memory_options as mem
from quantkit.cli import options as opt
from quantkit.cli import serve_options as srv
from quantkit.engines.launch import BACKENDS


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve-plan")(serve_plan)


def serve_plan(
    output: srv.OutputArgument,
    prefill: srv.PrefillOption = None,
    engine: mem.EngineOption = None,
    gpu: mem.GpuOption = None,
    gpu_gib: mem.GpuGibOption = None,
    tp: srv.TpOption = None,
    prefill_tp: srv.PrefillTpOption = None,
    ep: mem.EpOption = None,
    dp_attention: mem.DpAttentionOption = None,
    backend: srv.BackendOption = BACKENDS[0],
    kv_dtype: srv.KvDtypeOption = None,
    context: srv.ContextOption = None,
    concurrency: mem.ConcurrencyOption = None,
    max_running_requests: srv.MaxRequestsOption = None,
    mem_fraction_static: mem.MemFractionOption = None,
    gpu_memory_utilization: mem.UtilizationOption = None,
    mtp: srv.MtpOption = None,
    draft: srv.DraftOption = None,
    host: srv.HostOption = None,
    prefill_host: srv.PrefillHostOption = None,
    port: srv.PortOption = None,
    router_port: srv.RouterPortOption = None,
    ib_device: srv.IbDeviceOption = None,
    template: srv.TemplateOption = None,
    estimate: srv.EstimateOption = False,
    allow_overcommit: mem.OvercommitOption = False,
    as_json: opt.JsonOption = False,
) -> None:
    """Print launch lines of a prefill pool, a decode pool and their router, or of one pool, and what fits on each.

    Every flag has its reason beside it, and every pool a memory plan that agrees with its flags. Exits with 4 where the
    engine cannot load a checkpoint, with 5 where a pool does not fit.

    Example: quantkit serve-plan glm-5.2 --prefill glm-5.2 --gpu h200 --tp 8 --context 128k
    """
    from quantkit.cli.memory_request import MemoryOptions, in_lower_case
    from quantkit.cli.serve_request import ServeOptions, request_of
    from quantkit.cli.show_serving import ServeOutput, show_serving

    memory = MemoryOptions(
        tp=tp,
        ep=ep,
        dp_attention=dp_attention,
        gpu=gpu,
        gpu_gib=gpu_gib,
        engine=engine,
        kv_dtype=kv_dtype,
        context=context,
        concurrency=concurrency,
        mem_fraction_static=mem_fraction_static,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    options = ServeOptions(
        output=output,
        prefill=prefill,
        memory=in_lower_case(memory),
        prefill_tp=prefill_tp,
        backend=backend,
        max_running_requests=max_running_requests,
        mtp=mtp,
        draft=draft,
        host=host,
        prefill_host=prefill_host,
        port=port,
        router_port=router_port,
        ib_device=ib_device,
    )
    shown = ServeOutput(template=template, with_estimate=estimate, as_json=as_json, allow_overcommit=allow_overcommit)
    show_serving(request_of(options), shown)
