"""Fetch a checkpoint from the Hugging Face hub into its cache, by the hub's own client."""

from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import SourceError

_NEVER_FETCHED = [
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.pkl",
    "*.npz",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A repository at one commit: ``directory`` is a folder of links into the cache."""

    directory: Path
    hub_id: str
    commit: str


def fetch_snapshot(hub_id: str, revision: str) -> Snapshot:
    """All files of a repository but other weight formats. Raises SourceError with the remedy for every failure."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def failed(what: str, remedy: str) -> SourceError:
        return SourceError(f"{hub_id}@{revision}: {what}", remedy=remedy)

    try:
        directory = Path(snapshot_download(hub_id, revision=revision, ignore_patterns=_NEVER_FETCHED))
    except GatedRepoError as error:
        raise failed(
            "the repository is gated", "accept its terms on the hub and log in with `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise failed("the hub has no such revision", "check the part behind @") from error
    except RepositoryNotFoundError as error:
        raise failed(
            "the hub has no such repository, or it is private", "check the name, or log in with `hf auth login`"
        ) from error
    except HFValidationError as error:
        raise failed("is not a hub id", "write it as org/name or org/name@revision") from error
    except LocalEntryNotFoundError as error:
        raise failed(
            "cannot be fetched and is not in the cache: the hub cannot be reached",
            "check the network, or name a directory (there is none of that name here)",
        ) from error
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise failed(
            f"cannot be fetched ({first_line})",
            "check the network and the free disk space, then run the same command again: downloads resume",
        ) from error
    return Snapshot(directory=directory, hub_id=hub_id, commit=directory.name)
