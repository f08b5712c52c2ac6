"""A safetensors file that appears whole or not at all, where no file was; ``output.py`` is the same of a directory."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from quantkit.checkpoint.disk import draft_of, named_errors, put_in_place
from quantkit.checkpoint.writer import METADATA, ShardWriter, order_tensors
from quantkit.errors import QuantkitError, UsageError
from quantkit.tensors import TensorSpec


def check_new_file(path: Path, *, outside: Path | None = None) -> None:
    """Refuse a file that is there, or a link, wherever it leads; and one that would lie in ``outside``, a source.

    In a checkpoint without an index every safetensors file is a shard; in an output no manifest would name it.
    """
    with named_paths(path):
        if path.exists() or path.is_symlink():
            raise UsageError("exists already", file=path, remedy="choose another -o, or remove it")
        if outside is not None and path.resolve().is_relative_to(outside.resolve()):
            raise UsageError("lies in the source", file=path, remedy="choose a -o apart from it")


@contextmanager
def named_paths(path: Path) -> Iterator[None]:
    """Turns what a path that cannot be meant raises while it is looked at into a UsageError."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"cannot be an output ({reason})", file=path, remedy="choose another with -o") from error


@contextmanager
def whole_shard(
    path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] = METADATA
) -> Iterator[ShardWriter]:
    """Writes beside ``path``, over what a run that was cut has left there, and gives it its name where the block ends.

    The block writes every byte. Where it raises, nothing is left.
    """
    draft = draft_of(path)
    with named_errors(path):
        draft.unlink(missing_ok=True)
    try:
        writer = ShardWriter(draft, order_tensors(specs), metadata)
        try:
            yield writer
            writer.close()
        finally:
            writer.abort()
    except QuantkitError as error:
        if error.file == str(draft):
            error.file = str(path)  # the name that the user knows
        raise
    with named_errors(path):
        put_in_place(draft, path)
