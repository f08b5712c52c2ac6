"""From a request to a plan of servers: pools planned and checked, flags from one place, an argument vector each."""

from dataclasses import dataclass, replace

from quantkit.engines.parallel import ENGINE_VERSIONS
from quantkit.engines.verdicts import Outcome
from quantkit.errors import UsageError
from quantkit.machine import uncollected
from quantkit.memory.plan import Verdict
from quantkit.memory.sglang import DRAFT_REQUESTS, DRAFT_TOKENS
from quantkit.serving import sglang, vllm
from quantkit.serving.agreed import agreed_flags
from quantkit.serving.flags import Flag, Server
from quantkit.serving.models import chooses_itself, parsers_of
from quantkit.serving.pool import Pool, make_pool, speculates
from quantkit.serving.request import PORTS, ServeRequest, check_request
from quantkit.serving.served import Served, resolve_served, same_model


@dataclass(frozen=True, kw_only=True)
class ServePlan:
    """``pools``: prefill first, that of OUTPUT last. ``notes``: what is not known, or must be seen to."""

    request: ServeRequest
    pools: tuple[Pool, ...]
    servers: tuple[Server, ...]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return all(pool.plan.verdict is not Verdict.DOES_NOT_FIT for pool in self.pools)

    @property
    def agreed(self) -> tuple[Flag, ...]:
        """Flags that both pools are started with."""
        return tuple(one for one in self.servers[0].flags if one.is_agreed)


def make_serve_plan(request: ServeRequest) -> ServePlan:
    """Raises UsageError for options, VerificationError for a checkpoint that the engine refuses.

    That a pool does not fit is a verdict of its memory plan, and no error here.
    """
    check_request(request)
    with uncollected():
        return _make(request)


def _make(request: ServeRequest) -> ServePlan:
    output = resolve_served(request.output, is_converted=True)
    prefill = None if request.prefill is None else resolve_served(request.prefill, is_converted=False)
    draft = None if request.draft is None else resolve_served(request.draft, is_converted=False)
    notes: list[str] = []
    for other in (prefill, draft):
        notes += [] if other is None else same_model(other, output)
    served = (output,) if prefill is None else (prefill, output)
    has_mtp = speculates(request.mtp, served, draft)
    pools = _pools(request, served, has_mtp=has_mtp)
    pools = (*pools[:-1], replace(pools[-1], draft=draft if has_mtp else None))
    servers = _servers(request, pools, has_mtp=has_mtp)
    notes += _notes(request, pools, has_mtp=has_mtp)
    return ServePlan(request=request, pools=pools, servers=servers, notes=tuple(notes))


def _pools(request: ServeRequest, served: tuple[Served, ...], *, has_mtp: bool) -> tuple[Pool, ...]:
    if len(served) == 1:
        return (make_pool(request, served[0], "both", has_mtp=has_mtp),)
    prefill, output = served
    return (
        make_pool(request, prefill, "prefill", has_mtp=has_mtp),
        make_pool(request, output, "decode", has_mtp=has_mtp),
    )


def _servers(request: ServeRequest, pools: tuple[Pool, ...], *, has_mtp: bool) -> tuple[Server, ...]:
    network, output = request.network, pools[-1]
    port = network.port or PORTS[request.engine]
    if request.engine == "vllm":
        hosts = _hosts(network.hosts, output, "--host")
        return vllm.pool_servers(request, output, has_mtp=has_mtp, hosts=hosts, port=port)
    agreed = agreed_flags(request, pools, has_mtp=has_mtp)
    hosts = _hosts(network.hosts, output, "--host")
    if len(pools) == 1:
        return sglang.pool_servers(request, output, agreed, hosts=hosts, port=port)
    first = _hosts(network.prefill_hosts, pools[0], "--prefill-host")
    prefills = sglang.pool_servers(request, pools[0], agreed, hosts=first, port=port)
    # another port, so that both may stand on one node
    decodes = sglang.pool_servers(request, output, agreed, hosts=hosts, port=port + 1)
    return (*prefills, *decodes, sglang.router(request, prefills[0], decodes[0]))


def _hosts(given: tuple[str, ...], pool: Pool, option: str) -> tuple[str, ...]:
    """One for each node: as given, or called as the servers are."""
    count = pool.num_nodes
    if given and len(given) != count:
        raise UsageError(f"{option} names {len(given)} hosts, the pool has {count} nodes", remedy="name one a node")
    name = "server" if pool.role == "both" else pool.role
    return given or ((name,) if count == 1 else tuple(f"{name}-{rank}" for rank in range(count)))


def _dispatch_notes(request: ServeRequest, output: Pool, *, has_mtp: bool) -> list[str]:
    """DeepEP's low-latency mode has room for so many tokens a rank and step, and no more."""
    if output.backend not in ("deepep", "mori") or not request.concurrency:
        return []
    requests = -(-request.concurrency // output.parallel.dp_attention)
    tokens, most = requests * (DRAFT_TOKENS if has_mtp else 1), sglang.DISPATCH_TOKENS
    if tokens <= most:
        return []
    return [
        f"{tokens} tokens a rank and step are more than the {most} that low-latency dispatch has room for: set "
        f"{sglang.DISPATCH_VARIABLE}, ask for less --concurrency, or for more --dp-attention"
    ]


def _notes(request: ServeRequest, pools: tuple[Pool, ...], *, has_mtp: bool) -> list[str]:
    engine, output = request.engine, pools[-1]
    told = [
        f"flags are those that {engine} {ENGINE_VERSIONS[engine]} has, read in its source; no server was started with "
        "them"
    ]
    told += [
        f"{pool.served.path}: {row.example.message}"
        for pool in pools
        for outcome in (Outcome.UNKNOWN, Outcome.FLAG)
        for row in pool.report.with_outcome(outcome)
        if row.example.message not in {why for _, why in pool.needed}
    ]
    if len(pools) == 2:
        told.append("decode reads the KV cache that another checkpoint wrote: measure the pair, not each alone")
        told.append("the router is a package of its own (sglang-router), with versions of its own")
    model_type = str(output.served.config.get("model_type", ""))
    if parsers_of(model_type, output.served.names) is None and not chooses_itself(model_type):
        told.append(f"which parsers of tool calls and thoughts a {model_type or 'model like this'} needs is not known")
    if output.draft is not None:
        told.append(
            f"the memory plan counts the draft layers of {output.served.path}, not those of {output.draft.path}"
        )
    told += _dispatch_notes(request, output, has_mtp=has_mtp)
    if has_mtp and request.max_running_requests is None and request.concurrency is None and engine == "sglang":
        told.append(f"with speculation SGLang runs {DRAFT_REQUESTS} requests at once unless --concurrency says more")
    return told
