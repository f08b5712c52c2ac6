"""Disk and memory that a plan needs."""

from dataclasses import dataclass

from quantkit.errors import ResourceError
from quantkit.machine import available_cores, available_memory_bytes, bytes_text
from quantkit.plan.plan import Plan
from quantkit.transcode import CPU

BASE_BYTES = 300 << 20  # interpreter, numpy, numba and the compiled kernels
GPU_BASE_BYTES = 3 << 30  # torch and its contexts; an estimate, not measured
TENSOR_BYTES = 1200  # of the plan, for each tensor of the source
WORKER_BYTES = 96 << 20  # one task: source rows, decoded rows, packed words, a hash buffer
_DOCUMENT_BYTES = 1 << 20  # config, card and the manifest's fixed part


def disk_bytes(plan: Plan) -> int:
    """Bytes of the whole output: shards to the byte, small files rounded up."""
    names = sum(len(name) + len(shard) + 16 for name, shard in plan.weight_map.items())
    sidecars = sum(sidecar.file_bytes for sidecar in plan.checkpoint.sidecars.copied)
    return sum(shard.file_bytes for shard in plan.shards) + sidecars + names + _DOCUMENT_BYTES


def memory_bytes(num_jobs: int, *, num_tensors: int = 0, device: str = CPU) -> int:
    """Resident memory of a conversion: of the checkpoint only the number of tensors counts, for the plan itself."""
    base = BASE_BYTES + (0 if device == CPU else GPU_BASE_BYTES)
    return base + num_tensors * TENSOR_BYTES + num_jobs * WORKER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Threads, and what they compute with."""

    num_jobs: int
    device: str = CPU

    def memory_bytes(self, plan: Plan) -> int:
        """What a conversion of ``plan`` needs with them."""
        num_tensors = len(plan.checkpoint.tensors)
        return memory_bytes(self.num_jobs, num_tensors=num_tensors, device=self.device)


def choose_jobs(num_jobs: int | None, max_memory_bytes: int | None, *, device: str = CPU) -> int:
    """Workers: as many as there are cores, but no more than fit into the memory that they may have.

    ``max_memory_bytes``: as given, else what this machine or container has left. Raises ResourceError where not one
    worker fits, or not as many as were asked for.
    """
    limit = available_memory_bytes() if max_memory_bytes is None else max_memory_bytes
    wanted = num_jobs or available_cores()
    if limit is None:
        return wanted
    fitting = (limit - memory_bytes(0, device=device)) // WORKER_BYTES
    if fitting < (num_jobs or 1):
        whose = "are available" if max_memory_bytes is None else "are allowed"
        raise ResourceError(
            f"{num_jobs or 1} workers need {bytes_text(memory_bytes(num_jobs or 1, device=device))} of memory and "
            f"{bytes_text(limit)} {whose}",
            remedy="use fewer with --jobs" if fitting > 0 else "give more with --max-memory, or more to the container",
        )
    return min(wanted, fitting)
