"""A compose file: a service for each server, in a profile of its own, since each stands on another node."""

from collections.abc import Iterator

from quantkit.serving.flags import Server
from quantkit.serving.make import ServePlan
from quantkit.serving.templates.heading import WORK, commented, heading, image, mounts
from quantkit.serving.templates.yaml_text import quoted, sequence


def compose_file(plan: ServePlan) -> str:
    """``docker compose --profile NAME up`` starts one server."""
    lines = [*heading(plan), "# start one: docker compose --profile NAME up; names: " + _names(plan), "services:"]
    for server in plan.servers:
        lines += list(_service(plan, server))
    return "\n".join(lines) + "\n"


def escaped(word: str) -> str:
    """Compose replaces variables in every scalar."""
    return word.replace("$", "$$")


def _names(plan: ServePlan) -> str:
    return ", ".join(server.name for server in plan.servers)


def _service(plan: ServePlan, server: Server) -> Iterator[str]:
    yield f"  {server.name}:  # on {server.host}"
    yield f"    image: {image(plan, server)}  # not looked up: put in the image that you use"
    yield f"    profiles: [{server.name}]"
    yield "    network_mode: host"
    yield "    ipc: host"
    yield "    ulimits: {memlock: -1}"
    yield "    restart: on-failure"
    yield f"    working_dir: {WORK}"
    yield "    entrypoint:  # in place of the image's own"
    yield from sequence(commented(server, [escaped(word) for word in server.argv]), 6)
    yield "    command: []"
    pairs = list(mounts(server))
    if pairs:
        yield "    volumes:"
    for outside, inside in pairs:
        yield "      - type: bind"
        yield f"        source: {quoted(escaped(outside))}"
        yield f"        target: {quoted(escaped(inside))}"
        yield "        read_only: true"
    if server.num_gpus:
        yield from _gpus(plan, server)


def _gpus(plan: ServePlan, server: Server) -> Iterator[str]:
    if plan.request.gpu.architecture.is_amd:
        yield "    devices: [/dev/kfd, /dev/dri, /dev/infiniband]"
        yield "    group_add: [video]"
        return
    yield "    deploy:"
    yield "      resources:"
    yield "        reservations:"
    yield f"          devices: [{{driver: nvidia, count: {server.num_gpus}, capabilities: [gpu]}}]"
    if len(plan.pools) > 1 or server.ports[-1][0] == "init":
        yield "    devices: [/dev/infiniband]  # of RDMA; leave it out without"
