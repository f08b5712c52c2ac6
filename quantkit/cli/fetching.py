"""A hub repository that is wanted whole: headers first, then every check, the download last and where asked for."""

from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.errors import UsageError

if TYPE_CHECKING:
    from quantkit.sources import ResolvedSource

KeepSourceOption = Annotated[
    bool, typer.Option("--keep-source", help="Download a hub repository into the hub client's cache, and keep it.")
]


def check_kept(resolved: "ResolvedSource", what: str, *, keep_source: bool) -> None:
    """Raise UsageError where what runs the model would have to download it, and nobody asked for that."""
    if resolved.repository is not None and not keep_source:
        raise UsageError(
            f"{what} runs the model, and its shards are still on the hub",
            remedy="give --keep-source, or name a directory",
        )
