"""What a deployment is asked to be: pools, sizes, names and ports. And what has no such shape."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from quantkit.engines.launch import BACKENDS
from quantkit.engines.parallel import DEFAULT_ENGINE, ENGINES, EngineName, Parallel
from quantkit.errors import UsageError
from quantkit.memory.gpus import Gpu
from quantkit.memory.kv_format import KvDtype
from quantkit.registry import one_of

GPUS_PER_NODE = 8
PORTS: Mapping[EngineName, int] = {"sglang": 30_000, "vllm": 8_000}  # the engines' own
ROUTER_PORT, BOOTSTRAP_PORT, INIT_PORT = 8_000, 8_998, 5_000
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]")
_LARGEST_PORT = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """``hosts``: one name a node of OUTPUT's pool; ``port``: of its servers, None for the engine's own."""

    hosts: tuple[str, ...] = ()
    prefill_hosts: tuple[str, ...] = ()
    port: int | None = None
    router_port: int = ROUTER_PORT
    ib_device: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """``prefill``: the checkpoint of a prefill pool, None for one pool that does both.

    ``parallel``: of OUTPUT's pool; ``prefill_tp`` None for the same ``tp``. ``mtp``: None where the checkpoint decides.
    ``draft``: a checkpoint whose draft layers are used in place of OUTPUT's own.
    """

    output: str
    gpu: Gpu
    prefill: str | None = None
    engine: EngineName = DEFAULT_ENGINE
    parallel: Parallel = field(default_factory=Parallel)
    prefill_tp: int | None = None
    backend: str = BACKENDS[0]
    fraction: float | None = None
    kv_dtype: KvDtype | None = None
    context: int | None = None
    concurrency: int | None = None
    max_running_requests: int | None = None
    mtp: bool | None = None
    draft: str | None = None
    network: Network = field(default_factory=Network)


def check_request(request: ServeRequest) -> None:
    """Raise UsageError for words that are none, and options that do not go together."""
    one_of("--engine", request.engine, ENGINES)
    one_of("--backend", request.backend, BACKENDS)
    if request.engine != "sglang":
        for option, value in {
            "--prefill": request.prefill,
            "--draft": request.draft,
            "--ib-device": request.network.ib_device,
        }.items():
            if value is not None:
                raise UsageError(f"{option} is an option of sglang", remedy="leave it out, or --engine")
        if request.backend != BACKENDS[0]:
            raise UsageError(f"--backend is not planned for {request.engine}", remedy="leave --backend out")
    if request.prefill is None and (request.prefill_tp is not None or request.network.prefill_hosts):
        raise UsageError("--prefill-tp and --prefill-host are of a prefill pool", remedy="name it with --prefill")
    if request.prefill is None and request.network.ib_device is not None:
        raise UsageError("--ib-device carries KV from prefill to decode", remedy="name a --prefill pool, too")
    if request.backend != BACKENDS[0] and request.parallel.ep not in (1, request.parallel.tp):
        raise UsageError(
            f"--backend {request.backend} deals experts out to all {request.parallel.tp} ranks",
            remedy=f"leave --ep out, or give --ep {request.parallel.tp}",
        )
    if request.mtp is False and request.draft is not None:
        raise UsageError("--draft is for speculation", remedy="leave --no-mtp out, or --draft")
    _check_network(request.network)


def _check_network(network: Network) -> None:
    for host in (*network.hosts, *network.prefill_hosts):
        if _HOST.fullmatch(host) is None:
            raise UsageError(
                f"{host!r} is no host", remedy="give names or addresses, commas between them, IPv6 in brackets"
            )
    for option, port in {"--port": network.port, "--router-port": network.router_port}.items():
        if port is not None and not 1 <= port < _LARGEST_PORT:
            raise UsageError(f"{option} {port} is no port", remedy=f"give one from 1 to {_LARGEST_PORT - 1}")


def nodes_of(parallel: Parallel) -> int:
    """Nodes that a pool's ranks stand on. Raises UsageError where they do not fill them evenly."""
    nodes = -(-parallel.num_gpus // GPUS_PER_NODE)
    if parallel.num_gpus % nodes:
        raise UsageError(
            f"{parallel.num_gpus} ranks do not divide over {nodes} nodes of {GPUS_PER_NODE} GPUs",
            remedy="choose another --tp or --prefill-tp",
        )
    return nodes
