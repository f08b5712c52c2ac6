"""One script for all nodes: its first argument says which server to become."""

import shlex
from collections.abc import Iterator

from quantkit.serving.flags import Server
from quantkit.serving.make import ServePlan
from quantkit.serving.templates.heading import heading


def shell_script(plan: ServePlan) -> str:
    """For bash. Each command is an array, since only there a comment may stand beside each word."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: ServePlan) -> Iterator[str]:
    names = [server.name for server in plan.servers]
    yield "#!/usr/bin/env bash"
    yield from heading(plan)
    yield f"# usage: bash FILE {'|'.join(names)}, each on its own node"
    yield "set -euo pipefail"
    yield 'case "${1:-}" in'
    for server in plan.servers:
        yield f"  {server.name})  # on {server.host}"
        yield from (f"    {line}" for line in array_lines("command", server))
        yield "    ;;"
    yield "  *)"
    yield f'    echo "usage: $0 {"|".join(names)}" >&2'
    yield "    exit 2"
    yield "    ;;"
    yield "esac"
    yield 'exec "${command[@]}"'


def array_lines(name: str, server: Server) -> Iterator[str]:
    """A bash array of the argument vector, a flag on each line with its reason."""
    rows = [(shlex.join(one.words), one.why) for one in server.flags]
    width = min(max((len(words) for words, _ in rows), default=0), _MOST_WIDTH)
    yield f"{name}=("
    yield f"  {shlex.join(server.program)}"
    for words, why in rows:
        yield f"  {words:<{width}}  # {why}"
    yield ")"


_MOST_WIDTH = 60
