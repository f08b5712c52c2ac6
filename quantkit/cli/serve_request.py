"""From the options of `serve-plan` to a request."""

from quantkit.cli.memory_request import check_options, engine_of, fraction_of, parallel_of
from quantkit.cli.serve_options import ServeOptions
from quantkit.errors import UsageError
from quantkit.memory.gpus import DEFAULT_GPU, gpu_named
from quantkit.memory.kv_format import KV_DTYPE_WORDS
from quantkit.memory.split import check_sizes
from quantkit.serving.request import ROUTER_PORT, Network, ServeRequest

_MOST_REQUESTS = 10**6


def request_of(options: ServeOptions) -> ServeRequest:
    """Raises UsageError for words and numbers that cannot be meant."""
    memory = options.memory
    check_options(memory)
    running = options.max_running_requests
    if running is not None and not 1 <= running <= _MOST_REQUESTS:
        raise UsageError(f"--max-running-requests {running} is no count", remedy="give 128, say")
    parallel = parallel_of(memory)
    check_sizes(parallel)
    if options.prefill_tp is not None and options.prefill_tp < 1:
        raise UsageError(f"--prefill-tp {options.prefill_tp} is no size", remedy="give 8 or 16, say")
    engine = engine_of(memory)
    return ServeRequest(
        output=options.output,
        gpu=gpu_named(memory.gpu or DEFAULT_GPU, total_gib=memory.gpu_gib),
        prefill=options.prefill,
        engine=engine,
        parallel=parallel,
        prefill_tp=options.prefill_tp,
        backend=options.backend,
        fraction=fraction_of(memory, engine),
        kv_dtype=None if memory.kv_dtype is None else KV_DTYPE_WORDS[memory.kv_dtype][0],
        context=memory.context,
        concurrency=memory.concurrency,
        max_running_requests=running,
        mtp=options.mtp,
        draft=options.draft,
        network=Network(
            hosts=_names(options.host),
            prefill_hosts=_names(options.prefill_host),
            port=options.port,
            router_port=ROUTER_PORT if options.router_port is None else options.router_port,
            ib_device=options.ib_device,
        ),
    )


def _names(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(name.strip() for name in text.split(","))
