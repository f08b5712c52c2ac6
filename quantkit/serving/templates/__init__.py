"""The same servers as a script, as units, as a compose file, as manifests. Each only wraps a server's ``argv``."""

from collections.abc import Callable, Mapping

from quantkit.registry import one_of
from quantkit.serving.make import ServePlan
from quantkit.serving.templates.compose import compose_file
from quantkit.serving.templates.k8s import manifests
from quantkit.serving.templates.shell import shell_script
from quantkit.serving.templates.systemd import units

TEMPLATES: Mapping[str, Callable[[ServePlan], str]] = {
    "shell": shell_script,
    "systemd": units,
    "compose": compose_file,
    "k8s": manifests,
}


def check_template(kind: str | None) -> None:
    """Raise UsageError for one that is not known."""
    if kind is not None:
        one_of("--template", kind, TEMPLATES)


def render_template(kind: str, plan: ServePlan) -> str:
    """The whole text."""
    return TEMPLATES[kind](plan)
