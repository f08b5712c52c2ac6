"""Deployments of published models, planned once."""

from functools import cache
from typing import Any
from unittest.mock import patch

from quantkit.memory.gpus import gpu_named
from quantkit.serving.make import ServePlan, make_serve_plan
from quantkit.serving.request import ServeRequest
from quantkit.serving.served import Served, resolve_served


@cache
def _resolved(name: str, is_converted: bool) -> Served:
    return resolve_served(name, is_converted=is_converted)


@cache
def served(output: str, *, gpu: str = "h200", **request: Any) -> ServePlan:
    """Of a request; arguments are its fields."""
    with patch("quantkit.serving.make.resolve_served", lambda name, *, is_converted: _resolved(name, is_converted)):
        return make_serve_plan(ServeRequest(output=output, gpu=gpu_named(gpu), **request))


def values_of(plan: ServePlan, role: str) -> dict[str, tuple[str, ...]]:
    """Flags of the first server of a role, by name."""
    server = next(server for server in plan.servers if server.role == role)
    return {one.name: one.values for one in server.flags}
