"""llm-compressor without its grid search: its warnings as lines of ours; no progress bars, and nothing printed."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

_WARNINGS = {"WARNING", "ERROR", "CRITICAL"}  # between them lie METRICs, a line for every module


@contextmanager
def only_warnings() -> Iterator[None]:
    """Each of its warnings once, on stderr. Its log is not set up again afterwards: nobody else writes there."""
    tracing = logging.getLogger("torch.fx")  # warns of a name that llm-compressor still calls
    level = tracing.level
    tracing.setLevel(logging.ERROR)
    try:
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), _quiet_libraries():
            yield
    finally:
        tracing.setLevel(level)


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """They print as they are imported, too."""
    import llmcompressor  # noqa: F401  (which sets its log up when it is imported)
    from compressed_tensors.utils import patch_attr
    from loguru import logger
    from tqdm.std import tqdm  # type: ignore[import-untyped]

    told: set[str] = set()

    def warn(message: Any) -> None:
        text = "".join(one if one.isprintable() else " " for one in message.record["message"])
        line = " ".join(text.split())
        if line not in told:
            told.add(line)
            sys.stderr.write(f"warning: llm-compressor: {line}\n")

    begin = tqdm.__init__

    def begin_hidden(bar: Any, *arguments: Any, **options: Any) -> None:
        begin(bar, *arguments, **{**options, "disable": True})

    logger.remove()
    sink = logger.add(warn, format="{message}", filter=lambda record: record["level"].name in _WARNINGS)
    try:
        with patch_attr(tqdm, "__init__", begin_hidden):
            yield
    finally:
        logger.remove(sink)
