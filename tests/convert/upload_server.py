"""A local server that speaks as much of the hub's protocol as an upload without Xet needs.

Who asks, repositories, the check of a card's front matter, what goes by LFS, the LFS batch with its basic transfer and
verification, commits with their parent, and what a repository holds. Bytes are kept, and their hashes checked.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

import yaml

from tests.checkpoint.hub_server import listen

TOKEN = "hf_secret_upload_token"
LFS_BYTES = 10 << 20  # of a file that is no shard


@dataclass
class Repository:
    """``lfs``: the sha256 of files that are pointers in git; ``commits``: their ids, the head last."""

    private: bool
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b"*.safetensors filter=lfs\n"})
    lfs: dict[str, str] = field(default_factory=dict)
    commits: list[str] = field(default_factory=lambda: ["0" * 40])


class UploadHub(BaseHTTPRequestHandler):
    """``trouble`` may answer a request instead, and says whether it did; ``requests`` are methods and paths."""

    repositories: dict[str, Repository]
    objects: dict[str, bytes]
    requests: list[tuple[str, str]]
    role = "write"
    writable = ("org",)
    trouble: Callable[["UploadHub"], bool]
    lock: threading.Lock
    body: bytes

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def do_PUT(self) -> None:
        self.answer()

    def answer(self) -> None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = b"".join(iter(self.chunk, b""))
        else:
            self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        with self.lock:
            self.requests.append((self.command, path))
        if self.trouble():
            return
        for method, pattern, route in ROUTES:
            match = re.fullmatch(pattern, path)
            if method == self.command and match is not None:
                is_signed = path.startswith("/lfs/")  # a signed address needs no token
                if not is_signed and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    self.reply(401, {"error": "Invalid username or password."})
                    return
                with self.lock:
                    route(self, *match.groups())
                return
        self.reply(404, {"error": "Not found"})

    def chunk(self) -> bytes:
        content = self.rfile.read(int(self.rfile.readline(), 16))
        self.rfile.readline()
        return content

    def reply(self, status: int, document: object, **headers: str) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    @property
    def origin(self) -> str:
        return f"http://{self.headers['Host']}"

    def repository(self, hub_id: str) -> Repository | None:
        """Answers for one that is not there."""
        if hub_id not in self.repositories:
            self.reply(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        return self.repositories.get(hub_id)

    def whoami(self) -> None:
        self.reply(200, {"type": "user", "name": "somebody", "auth": {"accessToken": {"role": self.role}}})

    def create(self) -> None:
        asked = json.loads(self.body)
        hub_id = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] not in self.writable:
            self.reply(403, {"error": "You don't have the rights to create a model under this namespace"})
        elif hub_id in self.repositories:
            url = f"{self.origin}/{hub_id}"
            self.reply(409, {"error": "You already created this model repo", "url": url})
        else:
            self.repositories[hub_id] = Repository(private=asked.get("visibility") == "private")
            self.reply(200, {"url": f"{self.origin}/{hub_id}", "name": hub_id})

    def validate(self) -> None:
        content = json.loads(self.body)["content"]
        match = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
        is_good = match is not None and isinstance(yaml.safe_load(match[1]), dict)
        errors = [] if is_good else [{"message": "no front matter"}]
        self.reply(200 if is_good else 400, {"errors": errors, "warnings": []})

    def info(self, hub_id: str) -> None:
        if (repository := self.repository(hub_id)) is not None:
            siblings = [self.sibling(repository, name) for name in sorted(repository.files)]
            info = {"_id": "1", "id": hub_id, "sha": repository.commits[-1], "private": repository.private}
            self.reply(200, {**info, "tags": [], "downloads": 0, "likes": 0, "siblings": siblings})

    def sibling(self, repository: Repository, name: str) -> dict[str, object]:
        content = repository.files[name]
        told = {"rfilename": name, "size": len(content), "blobId": git_hash(content)}
        if name in repository.lfs:
            told["lfs"] = {"sha256": repository.lfs[name], "size": len(content), "pointerSize": 135}
        return told

    def preupload(self, hub_id: str) -> None:
        if (repository := self.repository(hub_id)) is None:
            return
        files = []
        for asked in json.loads(self.body)["files"]:
            is_lfs = asked["path"].endswith(".safetensors") or asked["size"] > LFS_BYTES
            told = {"path": asked["path"], "uploadMode": "lfs" if is_lfs else "regular", "shouldIgnore": False}
            if asked["path"] in repository.files:
                told["oid"] = repository.lfs.get(asked["path"]) or git_hash(repository.files[asked["path"]])
            files.append(told)
        self.reply(200, {"files": files})

    def batch(self, hub_id: str) -> None:
        asked = json.loads(self.body)
        assert "basic" in asked["transfers"]
        objects = []
        for one in asked["objects"]:
            told = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in self.objects:
                address = f"{self.origin}/lfs/{one['oid']}"
                upload = {"href": f"{address}?X-Amz-Signature=secret_signature"}
                told["actions"] = {"upload": upload, "verify": {"href": f"{self.origin}/verify"}}
            objects.append(told)
        self.reply(200, {"transfer": "basic", "objects": objects})

    def put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            self.reply(400, {"error": "BadDigest"})
        else:
            self.objects[oid] = self.body
            self.reply(200, {})

    def verify(self) -> None:
        asked = json.loads(self.body)
        is_there = len(self.objects.get(asked["oid"], b"")) == asked["size"]
        self.reply(200 if is_there else 404, {})

    def commit(self, hub_id: str) -> None:
        if (repository := self.repository(hub_id)) is None:
            return
        lines = [json.loads(line) for line in self.body.splitlines()]
        header, operations = lines[0]["value"], lines[1:]
        if header.get("parentCommit", repository.commits[-1]) != repository.commits[-1]:
            self.reply(412, {"error": "A commit has happened since. Please refresh and try again."})
            return
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            else:
                assert operation["key"] == "lfsFile"
                if value["oid"] not in self.objects:
                    self.reply(400, {"error": "Your push was rejected because an LFS pointer points to nothing."})
                    return
                repository.files[value["path"]] = self.objects[value["oid"]]
                repository.lfs[value["path"]] = value["oid"]
        oid = hashlib.sha1(self.body).hexdigest()
        repository.commits.append(oid)
        self.reply(200, {"success": True, "commitUrl": f"{self.origin}/{hub_id}/commit/{oid}", "commitOid": oid})


_ID = r"([\w.-]+/[\w.-]+)"
ROUTES: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("GET", "/api/whoami-v2", UploadHub.whoami),
    ("POST", "/api/repos/create", UploadHub.create),
    ("POST", "/api/validate-yaml", UploadHub.validate),
    ("GET", f"/api/models/{_ID}", UploadHub.info),
    ("POST", f"/api/models/{_ID}/preupload/main", UploadHub.preupload),
    ("POST", rf"/{_ID}\.git/info/lfs/objects/batch", UploadHub.batch),
    ("PUT", r"/lfs/([0-9a-f]{64})", UploadHub.put),
    ("POST", "/verify", UploadHub.verify),
    ("POST", f"/api/models/{_ID}/commit/main", UploadHub.commit),
)


def git_hash(content: bytes) -> str:
    """Of a file that git holds itself."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serve_uploads() -> Iterator[tuple[type[UploadHub], str]]:
    """The handler class, whose attributes a test may change, and the address. No answer outlives the context."""
    fresh = {"repositories": {}, "objects": {}, "requests": [], "lock": threading.Lock(), "trouble": lambda _: False}
    handler = type("Handler", (UploadHub,), fresh)
    with listen(handler) as address:
        yield handler, address
