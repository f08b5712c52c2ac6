"""Disk and memory that a plan needs."""

from quantkit.errors import ResourceError
from quantkit.machine import available_memory_bytes, bytes_text
from quantkit.plan.plan import Plan

BASE_BYTES = 300 << 20  # interpreter, numpy, numba and the compiled kernels
WORKER_BYTES = 96 << 20  # one task: source rows, decoded rows, packed words, a hash buffer
_DOCUMENT_BYTES = 1 << 20  # config, card and the manifest's fixed part


def disk_bytes(plan: Plan) -> int:
    """Bytes of the whole output: shards to the byte, small files rounded up."""
    names = sum(len(name) + len(shard) + 16 for name, shard in plan.weight_map.items())
    sidecars = sum(sidecar.file_bytes for sidecar in plan.checkpoint.sidecars.copied)
    return sum(shard.file_bytes for shard in plan.shards) + sidecars + names + _DOCUMENT_BYTES


def memory_bytes(num_jobs: int) -> int:
    """Resident memory of a conversion: it does not depend on the checkpoint or its shards."""
    return BASE_BYTES + num_jobs * WORKER_BYTES


def check_memory(num_jobs: int) -> None:
    """Raise ResourceError when the workers cannot fit into what this machine or container has left."""
    available = available_memory_bytes()
    if available is not None and memory_bytes(num_jobs) > available:
        raise ResourceError(
            f"{num_jobs} workers need {bytes_text(memory_bytes(num_jobs))} of memory and "
            f"{bytes_text(available)} are available",
            remedy="use fewer with --jobs",
        )
