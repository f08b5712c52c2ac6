"""A unit for each server, one behind another. ``# FILE:`` names the file that a unit belongs into."""

from collections.abc import Iterator
from pathlib import Path

from quantkit.serving.flags import Server
from quantkit.serving.make import ServePlan
from quantkit.serving.templates.heading import heading

UNIT = "quantkit-{name}.service"
MARK = "# FILE: "
_ESCAPES = {"\\": "\\\\", '"': '\\"', "%": "%%", "$": "$$"}


def units(plan: ServePlan) -> str:
    """All of them."""
    lines = list(heading(plan))
    for server in plan.servers:
        lines += ["", f"{MARK}{UNIT.format(name=server.name)}  (on {server.host})", *_unit(plan, server)]
    return "\n".join(lines) + "\n"


def quoted(word: str) -> str:
    """One word of ExecStart: between quotes, without specifiers and variables."""
    return '"' + "".join(_ESCAPES.get(one, one) for one in word) + '"'


def _unit(plan: ServePlan, server: Server) -> Iterator[str]:
    yield "[Unit]"
    yield f"Description={plan.request.engine} {server.role} {server.name}"
    yield "After=network-online.target"
    yield "Wants=network-online.target"
    yield ""
    yield "[Service]"
    yield "# where the program lies, if not in /usr/local/bin or /usr/bin: ExecSearchPath=/opt/venv/bin"
    if any(not directory.startswith("/") for directory in server.directories):
        yield f"WorkingDirectory={str(Path.cwd()).replace('%', '%%')}"
    yield from _exec_start(server)
    yield "Restart=on-failure"
    yield "RestartSec=10"
    yield "# weights take minutes to load, and RDMA locks memory"
    yield "TimeoutStartSec=infinity"
    yield "LimitMEMLOCK=infinity"
    yield "LimitNOFILE=1048576"
    yield ""
    yield "[Install]"
    yield "WantedBy=multi-user.target"


def _exec_start(server: Server) -> Iterator[str]:
    """Comment lines between continued ones are skipped, as systemd.syntax(7) says."""
    program = " ".join(quoted(word) for word in server.program)
    lines = [" ".join(quoted(word) for word in one.words) for one in server.flags]
    yield f"ExecStart={program} \\"
    for index, (line, one) in enumerate(zip(lines, server.flags, strict=True)):
        yield f"# {one.name}: {one.why}"
        yield f"  {line}{'' if index == len(lines) - 1 else ' ' + chr(92)}"
