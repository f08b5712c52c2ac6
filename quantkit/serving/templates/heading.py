"""What every file begins with, as comment lines: pools with their memory, notes, and what a container is told."""

from collections.abc import Iterator
from pathlib import Path

from quantkit.engines.parallel import ENGINE_VERSIONS
from quantkit.serving.flags import Server, one_line
from quantkit.serving.make import ServePlan

WORK = "/work"  # where a container finds what a launch line names by a relative path


def heading(plan: ServePlan) -> Iterator[str]:
    """Comment lines."""
    engine = plan.request.engine
    yield f"# {engine} {ENGINE_VERSIONS[engine]}, written by quantkit serve-plan"
    for pool in plan.pools:
        memory = pool.plan
        low, mid, high = memory.num_tokens
        yield one_line(
            f"# {pool.role}: {pool.served.path} ({pool.served.stored}), {pool.parallel.num_gpus} x "
            f"{memory.request.gpu.title}: {memory.verdict}, weights {memory.tightest.weights_gib:.2f} GiB a rank, "
            f"{mid:,} KV tokens ({low:,} to {high:,}), {memory.requests_at_context:,} requests of "
            f"{memory.demand.context:,} tokens"
        )
    for note in plan.notes:
        yield one_line(f"# {note}")


def commented(server: Server, words: list[str]) -> Iterator[tuple[str, str]]:
    """The words of a server, one by one as a template writes them, and the reason behind the last word of a flag."""
    program, rest = words[: len(server.program)], words[len(server.program) :]
    yield from ((word, "") for word in program)
    position = 0
    for one in server.flags:
        count = len(one.words)
        for index, word in enumerate(rest[position : position + count]):
            yield word, one.why if index == count - 1 else ""
        position += count


def image(plan: ServePlan, server: Server) -> str:
    """Of the engine's own publisher, by its version; nobody looked whether it is there."""
    engine = plan.request.engine
    name = "lmsysorg/sglang" if engine == "sglang" else "vllm/vllm-openai"
    return f"{name}:v{ENGINE_VERSIONS[engine]}"


def mounts(server: Server) -> Iterator[tuple[str, str]]:
    """Directory on this machine, and where a container must see it, for each that a server reads."""
    for directory in server.directories:
        outside = Path(directory).absolute()
        yield str(outside), directory if directory.startswith("/") else f"{WORK}/{directory.removeprefix('./')}"
