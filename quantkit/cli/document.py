"""What JSON documents have in common."""

from typing import TYPE_CHECKING, Any

from quantkit import __version__

if TYPE_CHECKING:
    from quantkit.integrity.weight_errors import ClassError


def head(command: str, status: str = "ok") -> dict[str, Any]:
    """The command, the version that ran it, and how it ended."""
    return {"command": command, "version": __version__, "status": status}


def class_document(one: "ClassError") -> dict[str, Any]:
    """Errors of the weights of one role."""
    return {
        "role": str(one.role),
        "num_weights": one.num_weights,
        "relative_error": one.relative,
        "median_relative_error": one.median,
        "worst_relative_error": one.worst,
        "worst_weight": one.worst_name,
    }
