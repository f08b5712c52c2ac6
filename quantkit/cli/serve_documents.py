"""The JSON document of `serve-plan`; ``schemas/serve-plan.json`` says the same and is tested."""

from typing import Any

from quantkit.cli.document import head
from quantkit.cli.documents import engine_document
from quantkit.cli.memory_documents import plan_document
from quantkit.serving.estimate import EFFICIENCY, Estimate, StepEstimate
from quantkit.serving.flags import Server
from quantkit.serving.make import ServePlan
from quantkit.serving.pool import Pool


def serve_document(
    plan: ServePlan, estimate: Estimate | None, template: dict[str, str] | None, *, allow_overcommit: bool
) -> dict[str, Any]:
    """Pools with their memory plans, servers with their argument vectors, and what is not known."""
    is_failure = not plan.fits and not allow_overcommit
    return {
        **head("serve-plan", "failed" if is_failure else "ok"),
        "engine": plan.request.engine,
        "pools": [_pool(pool, allow_overcommit=allow_overcommit) for pool in plan.pools],
        "servers": [_server(server) for server in plan.servers],
        "agreed": [list(one.words) for one in plan.agreed],
        "notes": list(plan.notes),
        "estimate": None if estimate is None else _estimate(estimate),
        "template": template,
    }


def _pool(pool: Pool, *, allow_overcommit: bool) -> dict[str, Any]:
    return {
        "role": pool.role,
        "model_path": pool.served.path,
        "scheme": str(pool.served.stored),
        "nodes": pool.num_nodes,
        "memory": plan_document(pool.plan, allow_overcommit=allow_overcommit),
        "loading": engine_document(pool.report),
    }


def _server(server: Server) -> dict[str, Any]:
    return {
        "name": server.name,
        "role": server.role,
        "host": server.host,
        "node_rank": server.node_rank,
        "gpus": server.num_gpus,
        "argv": list(server.argv),
        "flags": [
            {"flag": one.name, "values": list(one.values), "why": one.why, "agreed": one.is_agreed}
            for one in server.flags
        ],
    }


def _estimate(estimate: Estimate) -> dict[str, Any]:
    return {
        "scheme": str(estimate.int4),
        "bandwidth_bytes_per_second": estimate.gpu.bandwidth,
        "efficiency": round(EFFICIENCY, 4),
        "experts": estimate.num_experts,
        "experts_per_token": estimate.experts_per_token,
        "steps": [_step(one) for one in estimate.steps],
    }


def _step(one: StepEstimate) -> dict[str, Any]:
    return {
        "concurrency": one.concurrency,
        "unique_experts": round(one.unique_experts, 2),
        "fp8_bytes": {"experts": round(one.fp8.experts), "rest": round(one.fp8.rest)},
        "int4_bytes": {"experts": round(one.int4.experts), "rest": round(one.int4.rest)},
        "fp8_ms": round(1e3 * one.fp8_seconds, 3),
        "int4_ms": round(1e3 * one.int4_seconds, 3),
        "experts_ratio": round(one.experts_ratio, 3),
        "ratio": round(one.ratio, 3),
    }
