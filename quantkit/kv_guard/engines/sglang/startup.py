"""Hooks of a server that starts: attach to its pools, look at its cache, and keep out what is not covered."""

from collections.abc import Callable
from typing import Any

from quantkit.kv_guard.engines.sglang.guard import Guard


class StartupHooks:
    """None of them is called by a request, but for those that are refused."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def pools_made(self, _: object, runner: Any) -> None:
        """AFTER _init_post_memory_pool_components: pools exist, graphs are not captured yet."""
        self._guard.attach(runner)

    def resized(self, _: object, allocator: Any, *__: object) -> None:
        """AFTER resize, behind the capture of graphs."""
        self._guard.attach_anew(allocator)

    def tree_made(self, result: Any, *_: object, **__: object) -> None:
        """AFTER build_kv_cache."""
        self._guard.check_tree(result.tree_cache)

    def refuse_beams(self, original: Callable[..., Any], coordinator: Any, req: Any, recv_req: Any) -> Any:
        """AROUND validate_and_init, which answers what is wrong with a request: it alone is refused, not the server."""
        if self._guard.guards_rows(coordinator.req_to_token_pool):
            return "Beam search is not covered by the KV guard of this server."
        return original(coordinator, req, recv_req)
