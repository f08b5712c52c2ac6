"""Assembles the commands and turns every error into one line and an exit code. Imports nothing heavy."""

import io
import os
import signal
import sys
import threading
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import typer

from quantkit import __version__
from quantkit.cli import (
    calibrate,
    card,
    convert,
    evaluate,
    gate,
    inspect,
    kv_guard,
    kv_scales,
    memory_plan,
    plan,
    recipes,
    relayout,
    serve_plan,
    verify,
)
from quantkit.cli.document import head
from quantkit.cli.summary_file import add_summary, asked_for
from quantkit.errors import QuantkitError, SourceError, UsageError
from quantkit.threads import FETCHERS

INTERRUPTED, TERMINATED = 130, 143

app = typer.Typer(
    name="quantkit",
    help="Offline INT4 quantization of FP8 mixture-of-experts checkpoints, for SGLang and vLLM.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None:
    pass


_COMMANDS = (
    convert,
    plan,
    verify,
    inspect,
    relayout,
    card,
    memory_plan,
    serve_plan,
    calibrate,
    kv_scales,
    evaluate,
    gate,
    kv_guard,
    recipes,
)
for _module in _COMMANDS:
    _module.register(app)


class _Stopped(SystemExit):
    """A signal. Not KeyboardInterrupt, which typer would take for its own."""


def _stop(signum: int, frame: FrameType | None) -> None:
    raise _Stopped(INTERRUPTED if signum == signal.SIGINT else TERMINATED)


# typer carries a copy of click, or uses the installed one: either way this is the base of its usage errors
_ClickException: type[Exception] = next(one for one in typer.BadParameter.__mro__ if one.__name__ == "ClickException")


def main() -> None:
    """Entry point. Exit codes: 0 ok, 1 a bug, 2 usage, 3 source, 4 verification, 5 does not fit, 130/143 signals."""
    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop)
    _open_streams()
    try:
        sys.exit(app(standalone_mode=False, prog_name="quantkit"))
    except QuantkitError as error:
        _exit_with(error)
    except _ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.stdout.write(str(getattr(error, "message", "")) + "\n")
            sys.exit(2)
        message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
        context = getattr(error, "ctx", None)
        command = "quantkit" if context is None else context.command_path
        _exit_with(UsageError(message[:1].lower() + message[1:], remedy=f"see {command} --help"))
    except OSError as error:  # what no check foresaw: a folder without permission, a name too long
        _exit_with(SourceError(str(error.strerror), file=error.filename, remedy="check the path and its permissions"))
    except _Stopped as stopped:
        from quantkit.cli import render

        render.warn("quantkit: interrupted")
        if not getattr(stopped, "__notes__", ()) and _nothing_begun(sys.argv[1:]):
            stopped.add_note("nothing was begun")
        _show_notes(stopped)
        notes = "; ".join(getattr(stopped, "__notes__", ()))
        _summarize(_document("Interrupted", "interrupted", remedy=notes or "run the same command again"))
        _leave(int(stopped.code or INTERRUPTED), at_once=True)
    except Exception as error:
        _summarize(
            _document(type(error).__name__, f"a bug: {error}", remedy="report it, with the traceback of the log")
        )
        raise


def _nothing_begun(arguments: list[str]) -> bool:
    """Whether nothing lies where the output that the arguments name, or what a run keeps beside it, would."""
    from quantkit.checkpoint.file_names import WORDS_SUFFIX

    outputs = [Path(after) for one, after in pairwise(arguments) if one in ("-o", "--output")]
    outputs += [Path(one.removeprefix("--output=")) for one in arguments if one.startswith("--output=")]
    beside = (path.with_name(path.name + end) for path in outputs[-1:] for end in ("", ".partial", WORDS_SUFFIX))
    return bool(outputs) and not any(map(os.path.lexists, beside))


def _open_streams() -> None:
    """Closed ones lead nowhere; what a stream's encoding does not have is spelled out."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  (for as long as we run)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _leave(code: int, *, at_once: bool = False) -> NoReturn:
    """Not by way of threads that wait for a network, where there are any."""
    if at_once or any(thread.name.startswith(FETCHERS) for thread in threading.enumerate()):
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def _show_notes(error: BaseException) -> None:
    from quantkit.cli import render

    for note in getattr(error, "__notes__", ()):
        render.warn(f"quantkit: {note}")


def _exit_with(error: QuantkitError) -> NoReturn:
    from quantkit.cli import render

    render.warn(f"quantkit: {error}")
    _show_notes(error)
    document = error_document(_command(), error)
    _summarize(document)
    if "--json" in sys.argv:
        render.show_json(document)
    _leave(error.exit_code)


def _command() -> str:
    return next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")


def _summarize(document: dict[str, Any]) -> None:
    """A job that failed has a summary too, whatever the command had come to."""
    try:
        add_summary(asked_for(document["command"], sys.argv[1:]), document)
    except UsageError as refusal:
        if refusal.message != document["error"]["message"]:
            from quantkit.cli import render

            render.warn(f"quantkit: no summary: {refusal}")


def error_document(command: str, error: QuantkitError) -> dict[str, Any]:
    """What ``--json`` prints instead of a result."""
    document = _document(type(error).__name__, error.message, remedy=error.remedy, command=command)
    document["error"] |= {"tensor": error.tensor, "file": error.file}
    return document


def _document(kind: str, message: str, *, remedy: str, command: str | None = None) -> dict[str, Any]:
    error = {"class": kind, "message": message, "remedy": remedy, "tensor": None, "file": None}
    return {**head(_command() if command is None else command, "error"), "error": error}
