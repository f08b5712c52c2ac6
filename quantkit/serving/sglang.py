"""Servers of SGLang 0.5.23: a pool on one node or several, and the router in front of a pair. Read in source."""

from collections.abc import Iterator

from quantkit.memory.rules import RULES
from quantkit.serving.flags import Flag, Server, ServerRole, flag, flags_of_words
from quantkit.serving.pool import Pool
from quantkit.serving.request import BOOTSTRAP_PORT, INIT_PORT, ServeRequest

PROGRAM = ("python", "-m", "sglang.launch_server")
ROUTER_PROGRAM = ("python", "-m", "sglang_router.launch_router")
ANY_ADDRESS = "0.0.0.0"
DISPATCH_VARIABLE, DISPATCH_TOKENS = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", 128
_SIZES = {
    "tp": "ranks that share every layer",
    "pp": "pipeline stages",
    "ep": "groups that whole experts are dealt out to",
    "dp_attention": "replicas of attention, each with requests of its own",
    "dcp": "slices of every request's KV cache",
}


def pool_servers(
    request: ServeRequest, pool: Pool, agreed: tuple[Flag, ...], *, hosts: tuple[str, ...], port: int
) -> tuple[Server, ...]:
    """One for each node: they differ in their rank alone."""
    common = (*_own_flags(request, pool), *agreed)
    role: ServerRole = pool.role
    name = "server" if role == "both" else role
    is_prefill = role == "prefill"
    return tuple(
        Server(
            name=name if pool.num_nodes == 1 else f"{name}-{rank}",
            role=role,
            host=host,
            program=PROGRAM,
            flags=(
                *common,
                *_node_flags(pool, hosts, rank),
                flag("--host", ANY_ADDRESS, why="reached from other nodes"),
                flag("--port", port, why="of requests"),
            ),
            num_gpus=pool.parallel.num_gpus // pool.num_nodes,
            node_rank=rank,
            directories=_directories(pool),
            ports=(
                ("http", port),
                *([("bootstrap", BOOTSTRAP_PORT)] if is_prefill else []),
                *([("init", INIT_PORT)] if pool.num_nodes > 1 else []),
            ),
        )
        for rank, host in enumerate(hosts)
    )


def _directories(pool: Pool) -> tuple[str, ...]:
    served = (pool.served,) if pool.draft is None else (pool.served, pool.draft)
    return tuple(dict.fromkeys(one.path for one in served if one.is_local))


def _own_flags(request: ServeRequest, pool: Pool) -> Iterator[Flag]:
    plan, served = pool.plan, pool.served
    yield flag("--model-path", served.path, why=str(served.stored))
    if served.revision is not None:
        yield flag("--revision", served.revision, why="of the repository")
    if served.method == "w4afp8":
        yield flag("--quantization", "w4afp8", why="INT4 experts with FP8 activations")
    for size, words in pool.parallel.flags_of("sglang").items():
        yield from flags_of_words(words, why=_SIZES[size])
    for name, why in pool.needed:
        yield flag(name, why=f"without it: {why}")
    if pool.backend != "none":
        yield flag("--moe-a2a-backend", pool.backend, why="carries tokens between the ranks of experts")
        if pool.backend in ("deepep", "mori"):
            yield from _deepep_mode(pool)
    yield from memory_flags(request, pool)
    if plan.request.max_running_requests is not None:
        yield flag("--max-running-requests", plan.request.max_running_requests, why="requests at once, as planned")
    if pool.role != "both":
        yield flag("--disaggregation-mode", pool.role, why="one half of a pair")
    if pool.role == "prefill":
        yield flag(
            "--disaggregation-bootstrap-port", BOOTSTRAP_PORT, why="where decode servers ask; the router tells it"
        )
    if pool.draft is not None:
        why = "draft layers of this checkpoint: SGLang finds out how they are stored, vLLM would not"
        yield flag("--speculative-draft-model-path", pool.draft.path, why=why)
        if pool.draft.revision is not None:
            yield flag("--speculative-draft-model-revision", pool.draft.revision, why="of its repository")


def _deepep_mode(pool: Pool) -> Iterator[Flag]:
    if pool.role == "decode":
        why = f"no large batches; at most {DISPATCH_TOKENS} tokens a rank and step, or {DISPATCH_VARIABLE}"
        yield flag("--deepep-mode", "low_latency", why=why)
    else:
        yield flag("--deepep-mode", "auto", why="normal for prefill, low_latency for decode")


def memory_flags(request: ServeRequest, pool: Pool) -> Iterator[Flag]:
    """The share of the GPU and the context, as the memory plan has them."""
    plan, rules = pool.plan, RULES[request.engine]
    asked = plan.request
    if asked.fraction is not None:
        gib = plan.tightest.budget.pool.mid
        yield flag(rules.fraction_option, f"{asked.fraction:g}", why=f"leaves {gib:.1f} GiB a rank for KV, as planned")
    context = plan.demand.context
    yield flag(rules.context_option, context, why="tokens of the longest request, as planned")


def _node_flags(pool: Pool, hosts: tuple[str, ...], rank: int) -> Iterator[Flag]:
    if pool.num_nodes == 1:
        return
    why = f"{pool.parallel.num_gpus} ranks stand on {pool.num_nodes} nodes"
    yield flag("--nnodes", pool.num_nodes, why=why)
    yield flag("--node-rank", rank, why="this node")
    yield flag("--dist-init-addr", f"{hosts[0]}:{INIT_PORT}", why="where the nodes meet: the first of them")


def router(request: ServeRequest, prefill: Server, decode: Server) -> Server:
    """In front of a pair; requests go to the first node of each pool."""
    urls = [f"http://{one.host}:{dict(one.ports)['http']}" for one in (prefill, decode)]
    port = request.network.router_port
    return Server(
        name="router",
        role="router",
        host="router",
        program=ROUTER_PROGRAM,
        flags=(
            flag("--pd-disaggregation", why="every request goes to a prefill and a decode server"),
            flag("--prefill", urls[0], BOOTSTRAP_PORT, why="with the port that its decode partner asks at"),
            flag("--decode", urls[1], why="answers come from here"),
            flag("--host", ANY_ADDRESS, why="reached from other nodes"),
            flag("--port", port, why="of requests: clients talk to this one"),
        ),
        ports=(("http", port),),
    )
