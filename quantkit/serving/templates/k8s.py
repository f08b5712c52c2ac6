"""Kubernetes manifests: a Deployment of one pod for each server, and a headless Service by the name of its host."""

import re
from collections.abc import Iterator

from quantkit.serving.flags import Server
from quantkit.serving.make import ServePlan
from quantkit.serving.templates.heading import WORK, commented, heading, image, mounts
from quantkit.serving.templates.yaml_text import quoted, sequence

_SERVICE_NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")


def manifests(plan: ServePlan) -> str:
    """Documents, one behind another."""
    lines = list(heading(plan))
    for server in plan.servers:
        lines += [*_deployment(plan, server), *_service(server)]
    return "\n".join(lines) + "\n"


def escaped(word: str) -> str:
    """Kubernetes replaces ``$(NAME)`` in commands, and takes two dollars for one."""
    return word.replace("$", "$$")


def _deployment(plan: ServePlan, server: Server) -> Iterator[str]:
    name = f"quantkit-{server.name}"
    yield "---"
    yield "apiVersion: apps/v1"
    yield "kind: Deployment"
    yield "metadata:"
    yield f"  name: {name}"
    yield "spec:"
    yield "  replicas: 1"
    yield "  strategy: {type: Recreate}  # its GPUs are free only when the old pod is gone"
    yield f"  selector: {{matchLabels: {{app: {name}}}}}"
    yield "  template:"
    yield f"    metadata: {{labels: {{app: {name}}}}}"
    yield "    spec:"
    yield "      containers:"
    yield f"        - name: {server.name}"
    yield f"          image: {image(plan, server)}  # not looked up: put in the image that you use"
    yield f"          workingDir: {WORK}"
    yield "          command:"
    yield from sequence(commented(server, [escaped(word) for word in server.argv]), 12)
    yield "          ports:"
    yield from (f"            - {{name: {kind}, containerPort: {port}}}" for kind, port in server.ports)
    if server.node_rank == 0:
        http = dict(server.ports)["http"]
        yield f"          readinessProbe: {{httpGet: {{path: /health, port: {http}}}, periodSeconds: 10}}"
    if server.num_gpus:
        vendor = "amd.com" if plan.request.gpu.architecture.is_amd else "nvidia.com"
        yield f'          resources: {{limits: {{{vendor}/gpu: "{server.num_gpus}"}}}}  # and what carries RDMA, if any'
    yield from _volumes(server)


def _volumes(server: Server) -> Iterator[str]:
    pairs = list(mounts(server))
    yield "          volumeMounts:"
    yield "            - {name: shm, mountPath: /dev/shm}"
    for index, (_, inside) in enumerate(pairs):
        yield f"            - {{name: model-{index}, mountPath: {quoted(inside)}, readOnly: true}}"
    yield "      volumes:"
    yield "        - {name: shm, emptyDir: {medium: Memory}}"
    for index, (outside, _) in enumerate(pairs):
        yield f"        - {{name: model-{index}, hostPath: {{path: {quoted(outside)}, type: Directory}}}}"


def _service(server: Server) -> Iterator[str]:
    """None where the host is an address, or a name that is no Service's."""
    if _SERVICE_NAME.fullmatch(server.host) is None:
        return
    yield "---"
    yield "apiVersion: v1"
    yield "kind: Service"
    yield "metadata:"
    yield f"  name: {server.host}"
    yield "spec:"
    yield "  clusterIP: None  # its name is the pod's own address, with every port"
    yield "  publishNotReadyAddresses: true  # nodes of one pool meet before any is ready"
    yield f"  selector: {{app: quantkit-{server.name}}}"
    yield f"  ports: [{', '.join(f'{{name: {kind}, port: {port}}}' for kind, port in server.ports)}]"
