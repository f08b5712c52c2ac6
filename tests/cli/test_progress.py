"""What whoever waits reads: what goes on, how fast this run is, and how long it will take."""

import rich.console
import rich.progress

from quantkit.cli import render
from quantkit.threads import Stage

GB = 10**9


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def plain_lines(monkeypatch, capsys, reports):
    """What is printed of (stage, bytes, seconds until then)."""
    clock = Clock()
    monkeypatch.setattr(render.time, "monotonic", clock)
    with render.progress(is_quiet=False) as advance:
        for stage, done, seconds in reports:
            clock.now += seconds
            advance(stage, done)
    return capsys.readouterr().err.splitlines()


def test_what_was_done_before_is_no_speed(monkeypatch, capsys):
    stage = Stage(label="convert", total_bytes=100 * GB, earlier_bytes=55 * GB)
    assert plain_lines(monkeypatch, capsys, [(stage, 0, 3), (stage, 4 * GB, 4), (stage, 5 * GB, 5)]) == [
        "convert: goes on from 55% of 93.13 GiB",
        "convert: 64% of 93.13 GiB, 1000 MB/s, 36 s left",
    ]


def test_stages_of_one_length_are_told_apart(monkeypatch, capsys):
    first, second = (Stage(label=label, total_bytes=2 * GB) for label in ("check finished work", "convert"))
    reports = [(first, 0, 0), (first, 2 * GB, 1), (second, 0, 7), (second, 1 * GB, 10)]
    assert plain_lines(monkeypatch, capsys, reports) == [
        "check finished work: 100% of 1.86 GiB, 2000 MB/s, 0 s left",
        "convert: 50% of 1.86 GiB, 100 MB/s, 10 s left",
    ]


def test_a_run_of_a_model_tells_how_long_a_layer_takes(monkeypatch, capsys):
    """And no bytes: of a small model, or a long text, 0 MB/s."""
    stage = Stage(label="calibrate", total_bytes=4000, earlier_bytes=1000, step="layer")
    assert plain_lines(monkeypatch, capsys, [(stage, 0, 1), (stage, 1000, 25), (stage, 2000, 50)]) == [
        "calibrate: goes on from 25%",
        "calibrate: 50%, 25.0 s a layer, 50 s left",
        "calibrate: 100%, 37.5 s a layer, 0 s left",
    ]


def test_time_left_goes_by_layers_where_their_number_is_known(monkeypatch, capsys):
    """The first has a tenth of the bytes, and takes as long as the three others."""
    stage = Stage(label="gptq", total_bytes=10, step="layer", num_steps=4)
    assert plain_lines(monkeypatch, capsys, [(stage, 0, 0), (stage, 1, 12.9)]) == [
        "gptq: 10%, 12.9 s a layer, 39 s left"
    ]


def test_the_bar_of_a_terminal_says_the_same(monkeypatch):
    clock, bars = Clock(), []
    monkeypatch.setattr(render.time, "monotonic", clock)

    class Bar(rich.progress.Progress):
        def __init__(self, *columns, **options):
            super().__init__(*columns, **options, get_time=clock, auto_refresh=False)
            bars.append(self)

    monkeypatch.setattr(rich.progress, "Progress", Bar)
    monkeypatch.setattr(render.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("CI", raising=False)
    with render.progress(is_quiet=False) as advance:
        (task,) = bars[0].tasks
        check = Stage(label="check finished work", total_bytes=60)
        convert = Stage(label="convert", total_bytes=100, earlier_bytes=60)
        for stage in (check, convert):
            advance(stage, 0)
            assert (task.description, task.completed, task.total) == (
                stage.label,
                stage.earlier_bytes,
                stage.total_bytes,
            )
            for _ in range(4):
                clock.now += 2
                advance(stage, 5)
            assert task.speed == 2.5
            assert task.completed == stage.earlier_bytes + 20
            assert "bytes/s" in shown(bars[0])
        layers = Stage(label="gptq", total_bytes=100, step="layer")
        advance(layers, 0)
        for _ in range(2):
            clock.now += 30
            advance(layers, 25)
        assert "gptq" in shown(bars[0])
        assert "50% 30.0 s a layer" in shown(bars[0])
        assert "bytes" not in shown(bars[0])


def shown(bar):
    """What the terminal has of it."""
    console = rich.console.Console(width=120)
    with console.capture() as captured:
        console.print(bar.make_tasks_table(bar.tasks))
    return captured.get()


def test_a_row_of_a_table_stays_in_its_line(capsys):
    """Whatever a name holds that comes from a file of somebody else."""
    render.show_table("tasks", ["task", "lost"], [["a\nb", "1"], ["c", "2"]])
    assert capsys.readouterr().out.splitlines() == ["tasks", "  task  lost", "  a\\nb     1", "  c        2", ""]
