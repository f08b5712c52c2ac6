"""A local server that speaks as much of the hub's protocol as downloads and range requests need."""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "zai-org/GLM-5.2-FP8"
CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class Request:
    """What a client asked."""

    method: str
    path: str
    headers: dict[str, str]

    @property
    def name(self) -> str:
        return self.path.partition("?")[0].rpartition("/")[2]


@lru_cache(maxsize=64)
def digest_of(path: Path, mtime_ns: int) -> str:
    """sha256 of a file: a hub does not compute it for every request."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class Hub(BaseHTTPRequestHandler):
    """``status`` for every request, where it is not 200; ``troubles`` answer the next GETs of shards instead."""

    directory: Path
    status = 200
    error_code = ""
    lists_sizes = True
    lists_hashes = False
    troubles: Iterator[Callable[["Hub", Path], None]]
    requests: list[Request]
    served: Counter[str]

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        self.requests.append(Request(self.command, self.path, {key.lower(): one for key, one in self.headers.items()}))
        if self.status != 200:
            self.reply(self.status, b"{}", {"X-Error-Code": self.error_code})
        elif self.path.startswith(f"/api/models/{REPOSITORY}/revision/"):
            self.reply(200, json.dumps(self.info()).encode(), {"Content-Type": "application/json"})
        elif self.path.startswith(f"/api/models/{REPOSITORY}/tree/{COMMIT}"):
            tree = [{"type": "file", "oid": "0" * 40, "size": size, "path": name} for name, size in self.files()]
            self.reply(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
        elif self.path.startswith(f"/{REPOSITORY}/resolve/{COMMIT}/"):
            self.answer_file(self.directory / unquote(self.path.partition("?")[0].partition(COMMIT)[2]).lstrip("/"))
        else:
            self.reply(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    def files(self) -> list[tuple[str, int]]:
        paths = [path for path in sorted(self.directory.rglob("*")) if path.is_file()]
        return [(path.relative_to(self.directory).as_posix(), path.stat().st_size) for path in paths]

    def info(self) -> dict[str, object]:
        info: dict[str, object] = {"_id": "1", "id": REPOSITORY, "sha": COMMIT, "private": False, "tags": []}
        with_sizes = self.lists_sizes and "blobs" in self.path
        info["siblings"] = [
            {"rfilename": name, **({"size": size} if with_sizes else {}), **self.lfs(name, size)}
            for name, size in self.files()
        ]
        return info | {"downloads": 0, "likes": 0}

    def lfs(self, name: str, size: int) -> dict[str, object]:
        """What the hub says of a large file."""
        if not (self.lists_hashes and name.endswith(".safetensors")):
            return {}
        digest = digest_of(self.directory / name, (self.directory / name).stat().st_mtime_ns)
        return {"lfs": {"sha256": digest, "size": size, "pointerSize": 135}}

    def answer_file(self, path: Path) -> None:
        if not path.is_file():
            self.reply(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        is_shard = path.name.endswith(".safetensors") and self.command == "GET"
        trouble = next(self.troubles, None) if is_shard else None
        if trouble is not None:
            trouble(self, path)
            return
        size = path.stat().st_size
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match is None:
            etag = digest_of(path, path.stat().st_mtime_ns)
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Content-Length": str(size)}
            self.send_part(path, 200, (0, size), headers)
        else:
            begin, end = int(match[1]), min(int(match[2] or size) + 1, size)
            headers = {"Content-Range": f"bytes {begin}-{end - 1}/{size}", "Content-Length": str(end - begin)}
            self.send_part(path, 206, (begin, end), headers)

    def send_part(self, path: Path, status: int, part: tuple[int, int], headers: dict[str, str]) -> None:
        """The bytes ``part`` of a file, counted as they leave; a client that hangs up ends it."""
        self.send_head(status, headers)
        if self.command == "HEAD":
            return
        position, end = part
        with path.open("rb") as stream:
            stream.seek(position)
            while position < end:
                chunk = stream.read(min(CHUNK_BYTES, end - position))
                try:
                    self.wfile.write(chunk)
                except ConnectionError:
                    break
                self.served[path.name] += len(chunk)
                position += len(chunk)

    def send_head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_head(status, {**headers, "Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serve(directory: Path, port: int = 0) -> Iterator[tuple[type[Hub], str]]:
    """The handler class, whose attributes a test may change, and the address. No answer outlives the context."""
    fresh = {"directory": directory, "troubles": iter(()), "requests": [], "served": Counter()}
    handler = type("Handler", (Hub,), fresh)
    with listen(handler, port) as address:
        yield handler, address


@contextmanager
def listen(handler: type[BaseHTTPRequestHandler], port: int = 0) -> Iterator[str]:
    """The address where it answers, each request in a thread of its own; no answer outlives the context."""
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = False  # so that closing waits for them, and their counts are final
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)  # looks so often for the end
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
