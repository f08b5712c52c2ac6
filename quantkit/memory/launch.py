"""The flags that a plan stands for, as the engine's command line spells them."""

from collections.abc import Iterator

from quantkit.memory.rules import RULES
from quantkit.memory.serving import MemoryRequest


def launch_flags(request: MemoryRequest) -> str:
    """Sizes, and what was given or logged; whatever is not here is the engine's default."""
    return " ".join(words for _, words in _flags(request))


def logged_flags(request: MemoryRequest) -> str:
    """Those of them that a server's log told, and whether it speculated."""
    told = [words for field, words in _flags(request) if field in request.logged]
    if request.with_mtp and "with_mtp" in request.logged:
        told.append("and speculation with the MTP layer")
    return " ".join(told)


def _flags(request: MemoryRequest) -> Iterator[tuple[str, str]]:
    """Field by field."""
    rules = RULES[request.engine]
    yield from request.parallel.flags_of(request.engine).items()
    if request.context is not None:
        yield "context", f"{rules.context_option} {request.context}"
    if request.fraction is not None:
        yield "fraction", f"{rules.fraction_option} {request.fraction:g}"
    if request.kv_dtype is not None:
        yield "kv_dtype", f"--kv-cache-dtype {rules.kv_dtype_words[request.kv_dtype]}"
    if request.max_running_requests is not None:
        yield "max_running_requests", f"--max-running-requests {request.max_running_requests}"
    if request.role != "both":
        yield "role", f"--disaggregation-mode {request.role}"
    if request.is_eager:
        yield "is_eager", rules.eager_option
