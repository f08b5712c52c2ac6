"""`quantkit calibrate`: what the modules of a model are fed, and what its KV cache holds."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import options as opt
from quantkit.cli import running
from quantkit.cli.fetching import KeepSourceOption
from quantkit.cli.groups import grouped


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("calibrate")(grouped(calibrate))


def calibrate(
    source: opt.SourceArgument,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Statistics file to create.")],
    tokens: running.TokenOptions,
    dtype: running.DtypeOption = "float32",
    device: running.ModelDeviceOption = "cpu",
    keep_source: KeepSourceOption = False,
    resume: opt.ResumeOption = True,
    quiet: opt.QuietOption = False,
    as_json: opt.JsonOption = False,
) -> None:
    """Run a model over a text, one layer in memory at a time, and write what was seen to a safetensors file.

    For convert --importance and --stats, and for kv-scales. An interrupted run goes on behind the last layer that it
    finished. Needs room on the disk of FILE for the hidden states of all tokens, four times.

    Example: quantkit calibrate ./GLM-5.2-FP8 --text prose.txt -o stats.safetensors
    """
    options = running.RunOptions(what="calibrate", tokens=tokens, dtype=dtype, device=device, keep_source=keep_source)
    from quantkit.checkpoint.output import partial_of
    from quantkit.checkpoint.whole_file import check_new_file

    tokens.check()
    if not partial_of(output).exists():  # what lies there is looked at, and removed, by check_output
        check_new_file(output)  # before the seconds that importing transformers takes
    options.check()
    from quantkit.calibrate.run import Calibration, check_output
    from quantkit.calibrate.run import calibrate as run
    from quantkit.cli import render
    from quantkit.cli.show_calibration import show_calibration

    model = options.open_source(source, lambda checkpoint: check_output(output, checkpoint.directory))
    found = running.read_tokens_of(model, tokens)
    with render.progress(is_quiet=quiet) as advance:
        report = run(Calibration(model=model, tokens=found, output=output, resume=resume, report_progress=advance))
    show_calibration(report, as_json=as_json)
