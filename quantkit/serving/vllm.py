"""Servers of vLLM 0.33.0: one pool, on one node or several. Read in source."""

from collections.abc import Iterator

from quantkit.errors import UsageError
from quantkit.memory.rules import RULES
from quantkit.memory.sglang import DRAFT_TOKENS
from quantkit.serving.flags import Flag, Server, flag, flags_of_words
from quantkit.serving.models import GLM_45, chooses_itself, parsers_of
from quantkit.serving.pool import Pool
from quantkit.serving.request import ServeRequest
from quantkit.serving.sglang import ANY_ADDRESS, memory_flags

PROGRAM = ("vllm", "serve")
_SIZES = {
    "tp": "ranks that share every layer of a replica",
    "pp": "pipeline stages",
    "ep": "whole experts are dealt out to all ranks",
    "dp_attention": "replicas of attention, each with requests of its own",
    "dcp": "slices of every request's KV cache",
}


def pool_servers(
    request: ServeRequest, pool: Pool, *, has_mtp: bool, hosts: tuple[str, ...], port: int
) -> tuple[Server, ...]:
    """One for each node; all but the first serve no requests."""
    if pool.num_nodes > 1 and pool.parallel.dp_attention > 1:
        raise UsageError(
            "replicas of attention over several nodes are not planned for vllm",
            remedy="leave --dp-attention out, or use --engine sglang",
        )
    common = tuple(_own_flags(request, pool, has_mtp=has_mtp))
    path = pool.served.path
    return tuple(
        Server(
            name="server" if pool.num_nodes == 1 else f"server-{rank}",
            role="both",
            host=host,
            program=(*PROGRAM, path),
            flags=(*common, *_node_flags(pool, hosts, rank), *_address(port, rank)),
            num_gpus=pool.parallel.num_gpus // pool.num_nodes,
            node_rank=rank,
            directories=(path,) if pool.served.is_local else (),
            ports=(("http", port),),
        )
        for rank, host in enumerate(hosts)
    )


def _own_flags(request: ServeRequest, pool: Pool, *, has_mtp: bool) -> Iterator[Flag]:
    plan, served = pool.plan, pool.served
    if served.revision is not None:
        yield flag("--revision", served.revision, why="of the repository")
    for size, words in pool.parallel.flags_of("vllm").items():
        yield from flags_of_words(words, why=_SIZES[size])
    yield from memory_flags(request, pool)
    running = request.max_running_requests or request.concurrency
    if running is not None:
        yield flag("--max-num-seqs", running, why="requests at once, as asked for")
    words = RULES["vllm"].kv_dtype_words[plan.kv_format.dtype]
    yield flag("--kv-cache-dtype", words, why=f"{plan.kv_format.layout} rows, as the memory plan counts them")
    if has_mtp:
        yield flag("--spec-method", "mtp", why="the checkpoint's own MTP layer drafts")
        yield flag("--spec-tokens", DRAFT_TOKENS - 1, why="tokens drafted one after another")
    model_type = str(served.config.get("model_type", ""))
    # one class stands behind the names of all GLM-4 versions here
    parsers = parsers_of(model_type, served.names) or (GLM_45 if chooses_itself(model_type) else None)
    if parsers is not None:
        yield flag("--enable-auto-tool-choice", why="without it no tool call is parsed")
        yield flag("--tool-call-parser", parsers.tool, why="tool calls as the model writes them")
        yield flag("--reasoning-parser", parsers.reasoning, why="thoughts apart from the answer")
    if served.has_remote_code:
        yield flag("--trust-remote-code", why="config.json has an auto_map: this runs code of the checkpoint, read it")


def _node_flags(pool: Pool, hosts: tuple[str, ...], rank: int) -> Iterator[Flag]:
    if pool.num_nodes == 1:
        return
    why = f"{pool.parallel.num_gpus} ranks stand on {pool.num_nodes} nodes"
    yield flag("--nnodes", pool.num_nodes, why=why)
    yield flag("--node-rank", rank, why="this node")
    yield flag("--master-addr", hosts[0], why="where the nodes meet: the first of them")
    if rank:
        yield flag("--headless", why="requests come to the first node")


def _address(port: int, rank: int) -> Iterator[Flag]:
    if rank == 0:
        yield flag("--host", ANY_ADDRESS, why="reached from other nodes")
        yield flag("--port", port, why="of requests")
