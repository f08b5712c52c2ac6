"""Some bytes of one file behind a URL, by the hub client's session. Its errors are the client's own, or ValueError.

Only ``hub.py`` imports this, and late: the hub's client takes a while to import.
"""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Event
from typing import Any, TypeVar

import httpx
from huggingface_hub import constants, get_session, hf_raise_for_status
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers, tqdm  # type: ignore[attr-defined]  # public, exported late

from quantkit.threads import StoppedError

_BUSY = {408, 429, 500, 502, 503, 504}
_EXPIRED = {401, 403}
_PAUSES = (1, 2, 4)  # seconds before asking again
_LONGEST_PAUSE = 60  # a hub that wants more is not waited for in silence
_SLOWEST_START, _SLOWEST_RATE = 60, 64 << 10  # seconds, and from then on bytes a second: below it, the body drips
_CONTENT_RANGE = re.compile(r"bytes (?P<first>\d+)-\d+/(?P<file_bytes>\d+|\*)", re.IGNORECASE)
_RATE_LIMIT = re.compile(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(?P<seconds>\d+)")  # nothing remains, until then

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRange:
    """``content`` is what was asked for, as far as the file goes; ``file_bytes`` the length of the whole file."""

    content: bytes
    file_bytes: int


def read_range(url: str, begin: int, end: int, listed_bytes: int | None, stop: Event | None = None) -> FileRange:
    """Bytes ``[begin, end)``; a server that sends the whole file is cut off behind them.

    ``listed_bytes``: the length of the file, where it is known. ValueError for an answer that cannot be meant.
    """
    if listed_bytes is not None:
        end = min(end, listed_bytes)
        if begin >= end:
            return FileRange(content=b"", file_bytes=listed_bytes)
    return patiently(lambda: _read_once(url, begin, end, listed_bytes, stop), stop=stop)


def patiently(ask: Callable[[], _T], *, stop: Event | None = None) -> _T:
    """Ask again, after a pause, while the hub is busy or the connection breaks; the last error is raised.

    With ``stop``, which ends a pause, a download is meant: its signed address may have expired, so that a 403 is asked
    again once.

    The client's own ``http_backoff`` does not fit: it knows nothing of a body that breaks off while it is read.
    """
    for attempt, pause in enumerate(_PAUSES):
        try:
            return ask()
        except (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError):
            wait = pause
        except HfHubHTTPError as error:
            wait = max(pause, _pause_asked_for(error.response.headers))
            is_expired = stop is not None and attempt == 0 and error.response.status_code in _EXPIRED
            if not (error.response.status_code in _BUSY or is_expired) or wait > _LONGEST_PAUSE:
                raise
        _sleep(wait, stop)
    return ask()


def _sleep(seconds: float, stop: Event | None) -> None:
    if stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        raise StoppedError


def stopping_bar(stop: Event) -> type[tqdm]:
    """What the client reports every chunk to: shows nothing, and ends the download once ``stop`` is set."""

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **{**keywords, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            if stop.is_set():
                raise StoppedError
            return None

    return Bar


def _pause_asked_for(headers: Mapping[str, str]) -> int:
    after = headers.get("Retry-After", "")
    limit = _RATE_LIMIT.search(headers.get("RateLimit", ""))
    return max(int(after) if after.isdecimal() else 0, int(limit["seconds"]) if limit else 0)


def _read_once(url: str, begin: int, end: int, listed_bytes: int | None, stop: Event | None) -> FileRange:
    headers = {**build_hf_headers(), "Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    # httpx drops the Authorization header when a redirect leaves the host or the port
    with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=timeout) as response:
        hf_raise_for_status(response)
        first, served_bytes = _place(response, begin)
        file_bytes = served_bytes if listed_bytes is None else listed_bytes
        if file_bytes is None:
            raise ValueError("it does not say how long the file is")
        if served_bytes not in {None, file_bytes}:
            raise ValueError(f"{listed_bytes} bytes are listed, the file served has {served_bytes}")
        content = _first_bytes(response, min(end, file_bytes) - first, stop)
    return FileRange(content=content[begin - first :], file_bytes=file_bytes)


def _place(response: httpx.Response, begin: int) -> tuple[int, int | None]:
    """Which byte of the file the body begins with, and the length of the whole file if the answer says it."""
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise ValueError("it is compressed, though that was not asked for")
    if response.status_code == httpx.codes.OK:
        length = response.headers.get("Content-Length")
        return 0, None if length is None else int(length)
    if response.status_code != httpx.codes.PARTIAL_CONTENT:
        raise ValueError(f"its status is {response.status_code}")
    content_range = response.headers.get("Content-Range")
    if content_range is None:
        return begin, None
    match = _CONTENT_RANGE.fullmatch(content_range)
    if match is None or int(match["first"]) != begin:
        raise ValueError(f"bytes from {begin} were asked for, its Content-Range is {content_range[:80]!r}")
    return begin, None if match["file_bytes"] == "*" else int(match["file_bytes"])


def _first_bytes(response: httpx.Response, count: int, stop: Event | None) -> bytes:
    content, started = bytearray(), time.monotonic()
    for chunk in response.iter_raw():
        content += chunk
        if stop is not None and stop.is_set():
            raise StoppedError
        if time.monotonic() - started > _SLOWEST_START + len(content) / _SLOWEST_RATE:
            raise httpx.ReadTimeout(f"only {len(content)} of {count} bytes came in {_SLOWEST_START} s")
        if len(content) > count:  # not at equality: a body read to its end leaves the connection for the next request
            break
    if len(content) < count:
        raise httpx.RemoteProtocolError(f"the body ends after {len(content)} of {count} bytes")
    return bytes(content[:count])
