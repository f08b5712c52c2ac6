"""The token sequences that a model is run over: from a file of ids, or from a text. Legend: N sequences, S tokens."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit.checkpoint.header import looks_like_text, read_header
from quantkit.checkpoint.reader import read_tensor
from quantkit.errors import SourceError, UsageError
from quantkit.tensors import I64

LEAST_LENGTH = 2  # a token, and one to be told from it
_IDS = "input_ids"
_FIRST = 256  # bytes that tell a text
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_MAKE_TOKENS = "make a safetensors file with input_ids, I64 [sequences, length], and give it with --tokens"
_REMEDY = f"put the tokenizer of this model there, or {_MAKE_TOKENS}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """``ids_NS``: int64, all within the vocabulary."""

    ids_NS: NDArray[np.int64]

    @property
    def sha256(self) -> str:
        """Of shape and ids."""
        begin = f"{list(self.ids_NS.shape)}\n".encode()
        return hashlib.sha256(begin + np.ascontiguousarray(self.ids_NS, dtype="<i8").tobytes()).hexdigest()

    @property
    def told(self) -> str:
        num_sequences, length = self.ids_NS.shape
        return told_tokens(num_sequences, length, self.sha256)

    @property
    def ids(self) -> Tensor:
        return torch.from_numpy(self.ids_NS)


def told_tokens(num_sequences: int | str, length: int | str, sha256: str) -> str:
    """How many, and which, in a few words."""
    return f"{num_sequences} x {length}, sha256 {sha256[:12]}"


def read_tokens(path: Path, *, vocabulary: int, sequences: int | None = None) -> Tokens:
    """``input_ids`` of a safetensors file, the first ``sequences`` of them.

    Raises SourceError for another file, a shape that cannot be meant and ids beyond the vocabulary.
    """
    check_no_text(path)
    found = [tensor for tensor in read_header(path).tensors if tensor.name == _IDS]
    if not found or found[0].spec.dtype != I64 or len(found[0].spec.shape) != 2:
        what = f"holds {found[0].spec}" if found else "is missing"
        raise SourceError(what, tensor=_IDS, file=path, remedy="store it as I64 [sequences, length]")
    ids_NS = np.asarray(read_tensor(found[0]), dtype=np.int64)[:sequences]
    return _checked(ids_NS, path, vocabulary)


def check_no_text(path: Path) -> None:
    """Raise SourceError for a text where token ids are wanted; what cannot be read is told by who reads it."""
    try:
        with path.open("rb") as stream:
            begin = stream.read(_FIRST)
    except OSError:
        return
    if looks_like_text(begin):
        raise SourceError("is a text, and --tokens takes a safetensors file", file=path, remedy="give it with --text")


def tokenize(path: Path, model: Path, *, vocabulary: int, length: int, sequences: int | None = None) -> Tokens:
    """A text cut into windows of ``length`` tokens, by the tokenizer beside the model; what is left over is dropped.

    No special tokens are added. Raises SourceError for a text too short, or a tokenizer that transformers cannot
    build without the checkpoint's own code.
    """
    if length < LEAST_LENGTH:
        raise UsageError(f"--length {length} is too short", remedy=f"give at least {LEAST_LENGTH}")
    ids = np.asarray(_encode(read_text(path), model), dtype=np.int64)
    num_windows = len(ids) // length
    if sequences is not None:
        num_windows = min(num_windows, sequences)
    if not num_windows:
        raise SourceError(
            f"has {len(ids)} tokens, fewer than one sequence of {length}",
            file=path,
            remedy="give a longer text"
            + (f", or a --length of at most {len(ids)}" if len(ids) >= LEAST_LENGTH else ""),
        )
    return _checked(ids[: num_windows * length].reshape(num_windows, length), path, vocabulary)


def read_text(path: Path) -> str:
    """Raises SourceError for a file that cannot be read, or is no UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SourceError(f"cannot be read ({error.strerror})", file=path, remedy="check the path") from error
    except UnicodeDecodeError as error:
        raise SourceError(f"is not UTF-8 text ({error})", file=path, remedy="give a text file") from error


def _encode(text: str, model: Path) -> list[int]:
    if not any((model / name).is_file() for name in _TOKENIZERS):
        raise SourceError(
            f"there is no {_TOKENIZERS[0]} (nor {', '.join(_TOKENIZERS[1:])})", file=model, remedy=_REMEDY
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    except (ValueError, OSError, KeyError, TypeError, ImportError) as error:
        raise SourceError(
            f"has no tokenizer that transformers builds without its own code ({_whole(error)})",
            file=model,
            remedy=_MAKE_TOKENS,
        ) from error
    return list(ids)


def _whole(error: Exception) -> str:
    """What a library says, all of it: its first line may end in the midst of a sentence."""
    return " ".join(str(error).split()) or type(error).__name__


def _checked(ids_NS: NDArray[np.int64], path: Path, vocabulary: int) -> Tokens:
    num_sequences, length = ids_NS.shape
    if not num_sequences or length < LEAST_LENGTH:
        raise SourceError(
            f"holds {num_sequences} sequences of {length} tokens",
            tensor=_IDS,
            file=path,
            remedy=f"give at least one of {LEAST_LENGTH}",
        )
    wrong_NS = (ids_NS < 0) | (ids_NS >= vocabulary)
    if wrong_NS.any():
        sequence, token = np.argwhere(wrong_NS)[0]
        raise SourceError(
            f"holds token {ids_NS[sequence, token]} at [{sequence}, {token}], the vocabulary has {vocabulary:,}",
            tensor=_IDS,
            file=path,
            remedy="tokenize with the tokenizer of this model",
        )
    return Tokens(ids_NS=ids_NS)
