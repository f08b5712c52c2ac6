"""What every command shares that runs a model: its options, the model and the token sequences."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from quantkit.errors import UsageError

if TYPE_CHECKING:
    from quantkit.checkpoint.source import Checkpoint
    from quantkit.streaming import StreamedModel, Tokens

TextOption = Annotated[
    Optional[Path],  # noqa: UP045  (typer reads it)
    typer.Option("--text", metavar="FILE", help="UTF-8 text, tokenized by the tokenizer beside the model."),
]
TokensOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--tokens", metavar="FILE", help="Safetensors with input_ids, I64 [sequences, length], instead."),
]
LengthOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--length", min=2, metavar="N", help="Tokens of each sequence of the text [default: 512]."),
]
SequencesOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--sequences", min=1, metavar="N", help="Run the first N only [default: all]."),
]
DtypeOption = Annotated[
    str, typer.Option("--dtype", metavar="float32|bfloat16", help="What weights and activations are computed in.")
]
ModelDeviceOption = Annotated[str, typer.Option("--device", metavar="DEVICE", help="Where it runs: cpu or cuda:N.")]

DTYPES = ("float32", "bfloat16")
DEFAULT_LENGTH = 512


def check_running(*, text: Path | None, tokens: Path | None, length: int | None, dtype: str) -> None:
    """Raise UsageError for options that do not go together, before anything is opened."""
    if (text is None) == (tokens is None):
        raise UsageError("what the model reads comes from --text or from --tokens", remedy="give one of the two")
    if tokens is not None and length is not None:
        raise UsageError("--length cuts a text; --tokens has sequences already", remedy="leave one of them out")
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype} is not known", remedy=f"choose {' or '.join(DTYPES)}")


def require_models() -> None:
    """Raise UsageError where what runs a model is not installed."""
    missing = next((name for name in ("torch", "transformers") if find_spec(name) is None), None)
    if missing is not None:
        raise UsageError(f"running a model needs {missing}", remedy="pip install 'quantkit[calibrate]'")


def open_source(source: str, *, device: str, dtype: str) -> "StreamedModel":
    """The model that SOURCE names. Raises SourceError for an architecture that cannot be run."""
    from quantkit.sources import resolve_source

    return open_checkpoint_model(resolve_source(source).checkpoint, device=device, dtype=dtype)


def open_checkpoint_model(checkpoint: "Checkpoint", *, device: str, dtype: str) -> "StreamedModel":
    """The model of a checkpoint in any form. Raises SourceError for an architecture that cannot be run."""
    from quantkit.families import family_of
    from quantkit.streaming import open_model
    from quantkit.streaming.devices import DTYPES, torch_device

    found = torch_device(device)
    return open_model(checkpoint, family_of(checkpoint.config), device=str(found), dtype=DTYPES[dtype])


def open_tokens(
    model: "StreamedModel", *, text: Path | None, tokens: Path | None, length: int | None, sequences: int | None
) -> "Tokens":
    """From the one that is given. Raises SourceError for a text too short and for ids beyond the vocabulary."""
    from quantkit.streaming import read_tokens, tokenize

    if tokens is not None:
        return read_tokens(tokens, vocabulary=model.vocabulary, sequences=sequences)
    assert text is not None
    return tokenize(
        text,
        model.checkpoint.directory,
        vocabulary=model.vocabulary,
        length=length or DEFAULT_LENGTH,
        sequences=sequences,
    )
