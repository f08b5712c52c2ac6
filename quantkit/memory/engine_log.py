"""What an engine's start-up log says about memory: the yardstick of a plan.

SGLang's "GB" are 2^30 bytes. Lines as SGLang 0.5.23 and vLLM 0.33.0 print them, and older forms of both.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import NoReturn

from quantkit.engines.parallel import EngineName
from quantkit.errors import SourceError
from quantkit.memory.engine_log_lines import ARGUMENT_PATTERNS, ARGUMENTS, KEYS, NUMBER, NUMBERS, LoggedValue

MAX_LOG_BYTES = 256 << 20
_MAX_LINE_BYTES = 1 << 20
_MAX_TEXT = 200
_MAX_NUMBERS = 1 << 16  # of one start

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SGLANG_PREFIX = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?((?: [A-Z_]+\d+)*)\]")
_ENGINE_CORE = re.compile(r"\((EngineCore\w*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLog:
    """The last complete start in a log. ``values`` has only what was logged, GiB and counts per rank; ``version`` is
    the engine's, or empty."""

    engine: EngineName
    file: str
    values: Mapping[str, LoggedValue]
    version: str = ""


_ENGINE_STARTS = "LLM engine (v"  # one line for each engine of data parallelism
_OPENING_MARKERS: Mapping[str, EngineName] = {
    "server_args=": "sglang",
    "vLLM server version": "vllm",
    "vLLM API server version": "vllm",
}
_ARGUMENT_MARKERS: Mapping[str, EngineName] = {
    "server_args=": "sglang",
    "non-default args:": "vllm",
    "args: Namespace(": "vllm",
    _ENGINE_STARTS: "vllm",
}
# the logo stands in for the line with version and model; \u2588 is its ink
_LOGO_VERSION = re.compile("\u2588\\s+version\\s+\\d")
_MODEL = re.compile("(?:vLLM server version \\S+, serving model|\u2588\\s+model)\\s+(\\S+)")
_POOL_DTYPE = re.compile(r"KV [Cc]ache (?:is )?allocated\. dtype: (?:torch\.)?(\w+)")
_CHOSEN_LINE = "Using KV cache dtype:"  # SGLang's, before it makes the pool
_CHOSEN_DTYPE = re.compile(rf"{_CHOSEN_LINE} (?:torch\.)?(\w+)")
_VERSION = re.compile("(?:server version |LLM engine \\(|\u2588\\s+version\\s+)v?(\\d+(?:\\.\\w+)+)")
_CACHE_FORMAT = re.compile(r"Using (\w+) KV cache format for")
_MARKERS = [*(number.marker for number in NUMBERS), *_OPENING_MARKERS, *_ARGUMENT_MARKERS]
_RELEVANT = re.compile("|".join(map(re.escape, [*_MARKERS, "\u2588", "KV cache format for", _CHOSEN_LINE])))


@dataclass(slots=True, kw_only=True)
class _Start:
    """One start of an engine: what it was asked for, and its numbers by key and rank in the order logged."""

    engine: EngineName
    asked: dict[str, LoggedValue] = field(default_factory=dict)
    kv_dtype: LoggedValue | None = None
    version: str = ""
    numbers: dict[str, dict[str, list[LoggedValue]]] = field(default_factory=dict)
    engine_cores: set[str] = field(default_factory=set)
    num_numbers: int = 0

    @property
    def has_memory(self) -> bool:
        return any(KEYS[key].is_memory for key in self.numbers)

    @property
    def is_complete(self) -> bool:
        return "weights_gib" in self.numbers and not {"kv_pool_gib", "kv_tokens"}.isdisjoint(self.numbers)


def read_engine_log(path: Path) -> EngineLog:
    """The last complete start in the log of an engine, else the last that got as far as memory.

    Raises SourceError when the file cannot be read, is no such log, or stops before any number.
    """
    starts: list[_Start] = []  # the one that is being read, and before it those that may still be the answer
    line = 0
    try:
        for line, text in _lines(path):
            _read_line(starts, line, text)
            if starts and starts[-1].num_numbers > _MAX_NUMBERS:
                remedy = "pass the part from the server's start up to its first request"
                _fail(path, f"has more than {_MAX_NUMBERS} figures of one start (line {line})", remedy)
    except OSError as error:
        remedy = "check that the file is there and readable"
        raise SourceError(f"cannot be read ({error.strerror})", file=path.name, remedy=remedy) from error
    if line == 0:
        _fail(path, "is empty", "write the server's output, stderr included, into it")
    if not starts:
        remedy = "pass what the server printed from its start on, at log level info"
        _fail(path, "is no log of SGLang or vLLM: none of their start-up lines is in it", remedy)
    chosen = _best(starts)
    if not chosen.has_memory:
        remedy = "wait until the server has loaded the weights, and save its log again"
        _fail(path, f"the log of {starts[-1].engine} stops before its first line about memory", remedy)
    return EngineLog(engine=chosen.engine, file=path.name, values=_values(chosen), version=chosen.version)


def _best(starts: list[_Start]) -> _Start:
    return max(reversed(starts), key=lambda start: (start.is_complete, start.has_memory))


def _fail(path: Path, message: str, remedy: str) -> NoReturn:
    raise SourceError(message, file=path.name, remedy=remedy)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers; a progress bar's carriage returns part a line."""
    number = 1
    with _open(path) as stream:
        num_bytes, file_bytes = 0, os.fstat(stream.fileno()).st_size
        while raw := stream.readline(_MAX_LINE_BYTES):
            num_bytes += len(raw)
            if max(num_bytes, file_bytes) > MAX_LOG_BYTES:
                _fail(path, f"is longer than {MAX_LOG_BYTES >> 20} MiB", "pass the part up to the first request")
            if b"\0" in raw:
                _fail(path, f"is no text: line {number} has a NUL byte", "pass the log unpacked, as UTF-8 text")
            for part in raw.decode(errors="replace").split("\r"):
                text = _COLOUR.sub("", part).strip()
                if text:
                    yield number, text
            number += raw.endswith(b"\n")


def _open(path: Path) -> BufferedReader:
    """Pipes too, but one that nobody writes to is empty: to open it would wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "rb")


def _read_line(starts: list[_Start], line: int, text: str) -> None:
    if not _RELEVANT.search(text):
        return

    def logged(value: float | int | str) -> LoggedValue:
        return LoggedValue(value=value, line=line, text=text[:_MAX_TEXT])

    for marker, engine in _OPENING_MARKERS.items():
        if marker in text:
            _start(starts, engine, is_opening=True)
    if _LOGO_VERSION.search(text):
        _start(starts, "vllm", is_opening=True)
    for marker, engine in _ARGUMENT_MARKERS.items():
        if marker in text:
            start = _engine_start(starts, text) if marker == _ENGINE_STARTS else _start(starts, engine)
            start.asked |= {key: logged(value) for key, value in _arguments(engine, text).items()}
    for number in NUMBERS:
        if number.marker in text and (matches := re.findall(number.pattern, text)):
            # SGLang's target and draft worker of one rank add up; what vLLM says twice of a rank does not
            prefix = _SGLANG_PREFIX.search(text)
            rank = str(line) if number.engine == "vllm" else prefix[1] if prefix else ""
            numbers = _start(starts, number.engine).numbers
            if number.key == "free_after_load_gib" and rank in numbers.get("kv_pool_gib", {}):
                continue  # a draft that is loaded when the pool is there already
            of_rank = numbers.setdefault(number.key, {}).setdefault(rank, [])
            of_rank += (logged(float(match.replace(",", ""))) for match in matches)
            starts[-1].num_numbers += len(matches)
    if starts:
        _read_names(starts[-1], text, logged)


def _read_names(start: _Start, text: str, logged: Callable[[str], LoggedValue]) -> None:
    if model := _MODEL.search(text):
        start.asked["model"] = logged(model[1])
    if cache_format := _CACHE_FORMAT.search(text):
        start.kv_dtype = logged(cache_format[1])
    if version := _VERSION.search(text):
        start.version = version[1]
    if start.kv_dtype is None and (dtype := _POOL_DTYPE.search(text) or _CHOSEN_DTYPE.search(text)):
        start.kv_dtype = logged(dtype[1])


def _start(starts: list[_Start], engine: EngineName, *, is_opening: bool = False) -> _Start:
    """The start that a line belongs to: a new one if it opens one, or comes from the other engine."""
    if not starts or starts[-1].engine != engine or (is_opening and starts[-1].numbers):
        starts[:] = [_best(starts)] if starts else []
        starts.append(_Start(engine=engine))
    return starts[-1]


def _engine_start(starts: list[_Start], text: str) -> _Start:
    """Engines of data parallelism start side by side; one that starts a second time was restarted."""
    core = match[1] if (match := _ENGINE_CORE.search(text)) else ""
    start = _start(starts, "vllm", is_opening=bool(starts) and core in starts[-1].engine_cores)
    start.engine_cores.add(core)
    return start


def _arguments(engine: EngineName, text: str) -> dict[str, float | int | str]:
    """What the text of a dictionary, a dataclass or a Namespace says; None is left out."""
    written: dict[str, str] = {}
    for name, value in ARGUMENT_PATTERNS[engine].findall(text):
        written.setdefault(name, value.strip("'\""))
    found: dict[str, float | int | str] = {}
    for name, value in written.items():
        key = ARGUMENTS[engine][name]
        kind = KEYS[key].kind
        if kind == "count" and re.fullmatch(r"\d{1,18}", value):
            found[key] = max(int(value), int(found.get(key, 0)))  # vLLM spells its context in two ways
        elif kind == "number" and re.fullmatch(NUMBER, value):
            found[key] = float(value)
        elif kind == "word" and value not in {"", "None", "False", "null"}:
            found[key] = value
    return found


def _values(start: _Start) -> dict[str, LoggedValue]:
    """What was asked for, and over it what came out: the tightest rank of each number."""
    values = dict(start.asked)
    replicas, is_dp_attention = values.pop("replicas", None), values.pop("is_dp_attention", None)
    if replicas is not None and is_dp_attention is not None:  # an older spelling; alone they are whole servers
        values["dp"] = max(replicas, values.get("dp", replicas), key=lambda logged: int(logged.value))
    if start.kv_dtype is not None:
        values["kv_dtype"] = start.kv_dtype
    for key, ranks in start.numbers.items():
        rule = KEYS[key]
        totals = []
        for logged in ranks.values():
            total = rule.of_rank([float(one.value) for one in logged])
            totals.append(replace(logged[0], value=int(total) if rule.kind == "count" else round(total, 6)))
        values[key] = rule.over_ranks(totals, key=lambda logged: logged.value)
    return values
