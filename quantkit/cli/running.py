"""What every command shares that runs a model: its options, the model and the token sequences."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.errors import SourceError, UsageError, not_installed
from quantkit.registry import one_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from quantkit.checkpoint.source import Checkpoint
    from quantkit.streaming import StreamedModel, Tokens

DtypeOption = Annotated[
    str, typer.Option("--dtype", metavar="float32|bfloat16", help="What weights and activations are computed in.")
]
ModelDeviceOption = Annotated[str, typer.Option("--device", metavar="DEVICE", help="Where it runs: cpu or cuda:N.")]

DTYPES = ("float32", "bfloat16")
DEFAULT_LENGTH = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOptions:
    """The sequences that a model is run over."""

    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="UTF-8 text, tokenized by the tokenizer beside the model."),
    ] = None
    tokens: Annotated[
        Path | None,
        typer.Option("--tokens", metavar="FILE", help="Safetensors with input_ids, I64 [sequences, length], instead."),
    ] = None
    length: Annotated[
        int | None,
        typer.Option("--length", min=2, metavar="N", help="Tokens of each sequence of the text [default: 512]."),
    ] = None
    sequences: Annotated[
        int | None,
        typer.Option("--sequences", min=1, metavar="N", help="Run the first N only [default: all]."),
    ] = None

    @property
    def is_given(self) -> bool:
        return any(one is not None for one in (self.text, self.tokens, self.length, self.sequences))

    def check(self) -> None:
        """Raise UsageError for options that do not go together, before anything is opened."""
        if (self.text is None) == (self.tokens is None):
            raise UsageError("what the model reads comes from --text or from --tokens", remedy="give one of the two")
        if self.tokens is not None and self.length is not None:
            raise UsageError("--length cuts a text; --tokens has sequences already", remedy="leave one of them out")

    def check_path(self) -> None:
        """Raise SourceError where there is no such file: said before the seconds that importing transformers takes."""
        path = self.text or self.tokens
        if path is not None and (path.is_dir() or not path.exists()):
            why = "Is a directory" if path.is_dir() else "No such file"
            raise SourceError(f"cannot be read ({why})", file=path, remedy="check the path")

    def check_file(self, *, vocabulary: int) -> None:
        """Raise SourceError for a file that cannot be read, or ids beyond the vocabulary: the model is not needed."""
        from quantkit.streaming.tokens import read_text, read_tokens

        if self.tokens is not None:
            read_tokens(self.tokens, vocabulary=vocabulary, sequences=self.sequences)
        if self.text is not None:
            read_text(self.text)

    def read(self, model: Path, *, vocabulary: int) -> "Tokens":
        """``model``: where a tokenizer lies. Raises SourceError for a text too short and ids beyond the vocabulary."""
        from quantkit.streaming import read_tokens, tokenize

        if self.tokens is not None:
            return read_tokens(self.tokens, vocabulary=vocabulary, sequences=self.sequences)
        assert self.text is not None
        return tokenize(
            self.text,
            model,
            vocabulary=vocabulary,
            length=self.length or DEFAULT_LENGTH,
            sequences=self.sequences,
        )


def check_dtype(dtype: str) -> None:
    """Raise UsageError for one that is not known."""
    one_of("--dtype", dtype, DTYPES)


def require_models(*others: str) -> None:
    """Raise UsageError where what runs a model is not installed, or one of the ``others`` that are to see it run."""
    missing = next((name for name in ("torch", "transformers", *others) if find_spec(name) is None), None)
    if missing is not None:
        raise not_installed("running a model", missing, extra="calibrate")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """``what`` runs the model, and how; ``keep_source``: a hub repository may be downloaded for it."""

    what: str
    tokens: TokenOptions
    dtype: str
    device: str
    keep_source: bool

    def check(self) -> None:
        """Raise UsageError for options that are none, packages and devices that are not here: nothing is opened."""
        self.tokens.check()
        check_dtype(self.dtype)
        self.tokens.check_path()
        require_models()
        from quantkit.streaming.devices import torch_device

        torch_device(self.device)

    def open_source(self, source: str, check: "Callable[[Checkpoint], None]" = lambda _: None) -> "StreamedModel":
        """The model that SOURCE names, fetched last of all: behind its headers, the tokens' file and ``check``.

        Raises UsageError for a model on the hub that is not to be kept, SourceError for one that cannot be run.
        """
        from quantkit.cli.fetching import check_kept
        from quantkit.sources import fetch_source, resolve_headers

        resolved = resolve_headers(source, keep_source=self.keep_source)
        check_kept(resolved, self.what, keep_source=self.keep_source)
        model = self.open_checkpoint(resolved.checkpoint)
        self.tokens.check_file(vocabulary=model.vocabulary)
        check(resolved.checkpoint)
        return model if resolved.repository is None else self.open_checkpoint(fetch_source(resolved).checkpoint)

    def open_checkpoint(self, checkpoint: "Checkpoint") -> "StreamedModel":
        """The model of a checkpoint in any form. Raises SourceError for an architecture that cannot be run."""
        return open_checkpoint_model(checkpoint, device=self.device, dtype=self.dtype)


def open_checkpoint_model(checkpoint: "Checkpoint", *, device: str, dtype: str) -> "StreamedModel":
    """The model of a checkpoint in any form. Raises SourceError for an architecture that cannot be run."""
    from quantkit.families import family_of
    from quantkit.streaming import open_model
    from quantkit.streaming.devices import torch_device, torch_dtype

    family = family_of(checkpoint.config)
    return open_model(checkpoint, family, device=torch_device(device), dtype=torch_dtype(dtype))


def read_tokens_of(model: "StreamedModel", options: TokenOptions) -> "Tokens":
    """By the model's own tokenizer and vocabulary."""
    return options.read(model.checkpoint.directory, vocabulary=model.vocabulary)
