"""For tests of pages: a parser, and a headless Chromium, which quantkit does not ship.

Its windows are no narrower than 500 px: narrower pages are looked at in frames.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
TIMEOUT_SECONDS = 60
VOID_TAGS = {"meta", "br", "rect", "line", "path"}
BLOCK_TAGS = {"p", "td", "th", "dd", "dt", "li", "h1", "h2", "h3", "title", "br", "text"}


def chromium() -> str:
    """The program; without one the test is skipped, in CI it fails."""
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is not None:
        return found
    reason = f"no browser: none of {', '.join(NAMES)}"
    if os.environ.get("CI"):
        pytest.fail(f"{reason}; apt-get install -y chromium")
    pytest.skip(reason)


def dump_dom(path: Path, width: int, *, dark: bool = False) -> str:
    """The document after it has loaded and its scripts have run, as HTML."""
    return _run(path, ["--dump-dom", f"--window-size={width},1000"], dark=dark)


def screenshot(path: Path, width: int, to: Path, *, height: int = 1600, dark: bool = False) -> None:
    """A PNG of the window."""
    _run(path, [f"--screenshot={to}", f"--window-size={width},{height}"], dark=dark)


def look(pages: Sequence[tuple[str, int]], probe: str, folder: Path, *, dark: bool = False) -> list[Any]:
    """What ``probe`` tells of each page at its width: JavaScript at the end of the page, which calls ``tell(value)``.

    All in one window; a page's policy against scripts is lifted.
    """
    frames = []
    for index, (page, width) in enumerate(pages):
        tell = (
            f"const tell = (seen) => parent.document.getElementById('seen{index}').textContent = JSON.stringify(seen)"
        )
        probed = page.replace("</body>", f"<script>{tell}\n{probe}</script></body>")
        probed = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", probed)
        frames.append(f'<iframe style="width:{width}px;height:800px;border:0" srcdoc="{escape(probed)}"></iframe>')
    places = "".join(f'<pre id="seen{index}"></pre>' for index in range(len(pages)))
    path = folder / "frames.html"
    path.write_text(f'<!doctype html><meta charset="utf-8">{places}{"".join(frames)}', encoding="utf-8")
    found = re.findall(r'<pre id="seen\d+">(.*?)</pre>', dump_dom(path, 1400, dark=dark), re.DOTALL)
    return [json.loads(unescape(one)) for one in found]


def _run(path: Path, options: list[str], *, dark: bool) -> str:
    scheme = [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [chromium(), *FLAGS, f"--user-data-dir={profile}", *scheme, *options, path.resolve().as_uri()]
        result = subprocess.run(command, capture_output=True, check=True, timeout=TIMEOUT_SECONDS)
    return result.stdout.decode()


class Reader(HTMLParser):
    """Tags with their attributes, and the text that is read; a tag that is left open fails."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        assert not self.open, "a tag is not closed"
        self.text = " ".join("".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID_TAGS:
            self.open.append(tag)
        if tag in BLOCK_TAGS:
            self.words.append(" ")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]
