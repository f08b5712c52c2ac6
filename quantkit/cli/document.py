"""What every JSON document begins with."""

from typing import Any

from quantkit import __version__


def head(command: str, status: str = "ok") -> dict[str, Any]:
    """The command, the version that ran it, and how it ended."""
    return {"command": command, "version": __version__, "status": status}
