"""A hub repository is catalogued from headers alone, and everything that can be wrong on the way has its message.

The real client asks a local server. Shards are sparse files, so large that nobody can mistake a header for one.
"""

import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
from itertools import repeat
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants

from quantkit.checkpoint import http_range
from quantkit.checkpoint.header import encode_header
from quantkit.checkpoint.remote import open_remote
from quantkit.checkpoint.source import open_checkpoint
from quantkit.errors import SourceError
from quantkit.tensors import BF16, F8_E4M3, TensorSpec
from tests.checkpoint.hub_server import COMMIT, REPOSITORY, Hub, serve

TOKEN = "hf_secret_token"
SHARD = "model-{:05d}-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
MIB = 1 << 20
SHARD_BYTES = 64 * MIB


def sparse_shard(path, specs, metadata=None):
    header = encode_header(specs, metadata or {"format": "pt"})
    path.write_bytes(header)
    os.truncate(path, len(header) + sum(spec.num_bytes for spec in specs.values()))


def write_index(directory, weight_map, name=INDEX):
    (directory / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def files(tmp_path):
    """Three shards of 64 MiB and a little, an index, a config."""
    directory = tmp_path / "files"
    directory.mkdir()
    weight_map = {}
    for number in range(1, 4):
        name = SHARD.format(number)
        specs = {
            f"layers.{number}.b": TensorSpec(F8_E4M3, (8192, 4096)),
            f"layers.{number}.a": TensorSpec(BF16, (4096, 4096)),
            f"layers.{number}.scalar": TensorSpec(BF16, ()),
        }
        sparse_shard(directory / name, specs)
        weight_map |= dict.fromkeys(specs, name)
    write_index(directory, weight_map)
    (directory / "config.json").write_text(
        json.dumps({"model_type": "any", "quantization_config": {"quant_method": "fp8"}})
    )
    return directory


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Points the client at an endpoint, with a cache of its own and a token; pauses are noted instead of made."""
    pauses = []

    def point(endpoint):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        return pauses

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("time.sleep", pauses.append)
    yield point
    close_session()


@pytest.fixture
def hub(files, client):
    with serve(files) as (handler, endpoint):
        handler.pauses = client(endpoint)
        yield handler


def shard_requests(handler):
    return [one for one in handler.requests if one.name.endswith(".safetensors")]


def catalogue(checkpoint):
    shards = [(shard.name, shard.file_bytes, [tensor.name for tensor in shard.tensors]) for shard in checkpoint.shards]
    tensors = [(name, one.name, one.spec, one.begin, one.path.name) for name, one in checkpoint.tensors.items()]
    return shards, tensors, checkpoint.config, checkpoint.quantization


def failure(revision="main", hub_id=REPOSITORY):
    with pytest.raises(SourceError) as caught:
        open_remote(hub_id, revision)
    assert str(caught.value).startswith(f"{hub_id}@{revision}")
    assert caught.value.remedy
    assert TOKEN not in str(caught.value)
    return caught.value


def as_it_is(directory):
    pass


def with_modelopt(directory):
    (directory / "config.json").write_text("{}")
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))


def with_other_index_name(directory):
    (directory / INDEX).rename(directory / "consolidated.safetensors.index.json")


def without_index(directory):
    (directory / INDEX).unlink()


def one_file_of_any_name(directory):
    for path in directory.glob("model*"):
        path.unlink()
    sparse_shard(directory / "a b#%41\u00fc.safetensors", {"w": TensorSpec(BF16, (64, 1024, 1024))})


def with_folders(directory):
    (directory / "original").mkdir()
    sparse_shard(directory / "original" / "other.safetensors", {"w": TensorSpec(BF16, (2,))})
    (directory / "original" / "config.json").write_text("not read")


def with_an_empty_shard(directory):
    sparse_shard(directory / SHARD.format(2), {"nothing": TensorSpec(BF16, (0, 7))})
    weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
    weight_map = {name: shard for name, shard in weight_map.items() if shard != SHARD.format(2)}
    write_index(directory, weight_map | {"nothing": SHARD.format(2)})


WHOLE = [
    as_it_is,
    with_modelopt,
    with_other_index_name,
    without_index,
    one_file_of_any_name,
    with_folders,
    with_an_empty_shard,
]


@pytest.mark.parametrize("change", WHOLE, ids=lambda change: change.__name__)
def test_catalogue_is_that_of_the_directory_and_no_shard_is_served(change, files, client):
    change(files)
    with serve(files) as (handler, endpoint):
        client(endpoint)
        remote = open_remote(REPOSITORY, "main")
    checkpoint = remote.checkpoint
    assert (remote.repository.hub_id, remote.repository.commit) == (REPOSITORY, COMMIT)
    assert catalogue(checkpoint) == catalogue(open_checkpoint(files))
    assert checkpoint.directory == Path(f"{REPOSITORY}@{COMMIT}")
    assert {shard.path.parent for shard in checkpoint.shards} == {checkpoint.directory}
    assert all(tensor.path.parent == checkpoint.directory for tensor in checkpoint.tensors.values())
    here = open_checkpoint(files).sidecars
    assert [one.name for one in checkpoint.sidecars.copied] == [one.name for one in here.copied]
    assert checkpoint.sidecars.skipped == here.skipped
    assert not checkpoint.is_assumed
    assert len(shard_requests(handler)) == len(checkpoint.shards)
    assert all(num_bytes <= MIB for name, num_bytes in handler.served.items() if name.endswith(".safetensors"))


def test_catalogue_of_what_the_safetensors_library_wrote(tiny_checkpoint, client):
    source = tiny_checkpoint("library")
    with serve(source.directory) as (_, endpoint):
        client(endpoint)
        checkpoint = open_remote(REPOSITORY, "main").checkpoint
    assert catalogue(checkpoint) == catalogue(open_checkpoint(source.directory))


def test_the_index_tells_how_much_to_ask_for(files, hub):
    specs = {f"layers.{number}.experts.weight": TensorSpec(F8_E4M3, (16384, 16384)) for number in range(2000)}
    sparse_shard(files / SHARD.format(2), specs)
    weight_map = json.loads((files / INDEX).read_text())["weight_map"]
    kept = {name: shard for name, shard in weight_map.items() if shard != SHARD.format(2)}
    write_index(files, kept | dict.fromkeys(specs, SHARD.format(2)))
    open_remote(REPOSITORY, "main")
    assert len(shard_requests(hub)) == 3
    header_bytes = len(encode_header(specs, {"format": "pt"}))
    assert header_bytes <= hub.served[SHARD.format(2)] <= 1.5 * header_bytes
    assert hub.served[SHARD.format(1)] == 1 << 16


@pytest.mark.parametrize("metadata_bytes", [100_000, 3 * MIB])
def test_a_longer_header_takes_a_second_request(metadata_bytes, files, hub):
    path = files / SHARD.format(2)
    specs = {tensor.name: tensor.spec for tensor in open_checkpoint(files).shards[1].tensors}
    sparse_shard(path, specs, {"history": "x" * metadata_bytes})
    checkpoint = open_remote(REPOSITORY, "main").checkpoint
    assert catalogue(checkpoint) == catalogue(open_checkpoint(files))
    first, second = [one.headers["range"] for one in shard_requests(hub) if one.name == path.name]
    header_bytes = len(encode_header(specs, {"history": "x" * metadata_bytes}))
    assert (first, second) == ("bytes=0-65535", f"bytes=65536-{header_bytes - 1}")
    assert hub.served[path.name] == header_bytes


def test_everything_is_asked_at_the_commit(hub):
    open_remote(REPOSITORY, "refs/pr/7")
    first, *others = hub.requests
    assert first.path.startswith(f"/api/models/{REPOSITORY}/revision/refs%2Fpr%2F7?")
    assert {one.name for one in others} == {"config.json", INDEX, *map(SHARD.format, (1, 2, 3))}
    assert all(one.path.startswith(f"/{REPOSITORY}/resolve/{COMMIT}/") for one in others)
    assert all(one.headers["authorization"] == f"Bearer {TOKEN}" for one in hub.requests)
    assert all(one.headers["accept-encoding"] == "identity" for one in shard_requests(hub))


def test_documents_come_from_the_cache_the_second_time(hub):
    open_remote(REPOSITORY, "main")
    hub.requests.clear()
    open_remote(REPOSITORY, "main")
    assert {one.name for one in hub.requests} == {"main", *map(SHARD.format, (1, 2, 3))}


def test_the_environment_says_where_the_hub_is(files, tmp_path):
    program = "import quantkit.checkpoint.remote as remote, sys; assert 'httpx' not in sys.modules\n"
    program += f"opened = remote.open_remote({REPOSITORY!r}, 'main')\n"
    program += "print(opened.repository.commit, *opened.checkpoint.tensors)"
    with serve(files) as (_, endpoint):
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        result = subprocess.run(
            [sys.executable, "-W", "error", "-c", program],
            capture_output=True,
            text=True,
            check=False,
            env={**environment, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN},
        )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [COMMIT, *open_checkpoint(files).tensors]


def send_whole(hub: Hub, path):
    size = path.stat().st_size
    hub.send_part(path, 200, (0, size), {"Content-Length": str(size)})


def send_whole_of_unsaid_length(hub: Hub, path):
    hub.send_part(path, 200, (0, path.stat().st_size), {})


def send_too_much(hub: Hub, path):
    size = path.stat().st_size
    hub.send_part(path, 206, (0, size), {"Content-Range": f"bytes 0-{size - 1}/{size}"})


@pytest.mark.parametrize("answer", [send_whole, send_whole_of_unsaid_length, send_too_much])
@pytest.mark.parametrize("metadata_bytes", [0, 3 * MIB])
def test_a_server_that_sends_the_whole_shard_is_cut_off(metadata_bytes, answer, files, client):
    for path in files.glob("model-*.safetensors"):
        specs = {f"{path.stem}.{number}": TensorSpec(F8_E4M3, (16384, 8192)) for number in range(2)}
        sparse_shard(path, specs, {"history": "x" * metadata_bytes})
    (files / INDEX).unlink()
    with serve(files) as (handler, endpoint):
        client(endpoint)
        handler.troubles = repeat(answer)
        if answer is send_too_much and metadata_bytes:
            assert "Content-Range" in failure().message  # of the second request, whose first byte it is not
            return
        checkpoint = open_remote(REPOSITORY, "main").checkpoint
    assert catalogue(checkpoint) == catalogue(open_checkpoint(files))
    for path in files.glob("model-*.safetensors"):
        assert handler.served[path.name] < path.stat().st_size / 4


def test_lengths_come_from_the_answers_where_they_are_not_listed(files, hub):
    hub.lists_sizes = False
    assert catalogue(open_remote(REPOSITORY, "main").checkpoint) == catalogue(open_checkpoint(files))
    hub.troubles = repeat(send_whole)
    assert catalogue(open_remote(REPOSITORY, "main").checkpoint) == catalogue(open_checkpoint(files))


def test_the_length_behind_a_pointer_counts(files, hub):
    def info(self):
        siblings = [
            {"rfilename": name, "size": 134, "lfs": {"size": size, "sha256": "0" * 64, "pointerSize": 134}}
            for name, size in self.files()
        ]
        return {"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}

    hub.info = info
    assert catalogue(open_remote(REPOSITORY, "main").checkpoint) == catalogue(open_checkpoint(files))


def range_said(content_range):
    """The right bytes under this Content-Range, or under none."""

    def send(hub: Hub, path):
        end = int(hub.headers["Range"].rpartition("-")[2]) + 1
        size = path.stat().st_size
        headers = {} if content_range is None else {"Content-Range": content_range.format(last=end - 1, size=size)}
        hub.send_part(path, 206, (0, min(end, size)), headers)

    return send


@pytest.mark.parametrize("content_range", [None, "bytes 0-{last}/*"])
def test_lengths_come_from_the_list_where_answers_say_none(content_range, files, hub):
    hub.troubles = repeat(range_said(content_range))
    assert catalogue(open_remote(REPOSITORY, "main").checkpoint) == catalogue(open_checkpoint(files))
    hub.lists_sizes = False
    assert "does not say how long" in failure().message


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (range_said("bytes 1-{last}/{size}"), "bytes from 0 were asked for"),
        (range_said("items 0-{last}/{size}"), "bytes from 0 were asked for"),
        (range_said("bytes 0-{last}/77777"), "the file served has 77777"),
        (lambda hub, path: hub.send_part(path, 200, (0, 9), {"Content-Length": "9"}), "the file served has 9"),
        (lambda hub, path: hub.send_part(path, 204, (0, 0), {}), "its status is 204"),
        (lambda hub, path: hub.send_part(path, 200, (0, 9), {"Content-Encoding": "gzip"}), "it is compressed"),
    ],
)
def test_answers_that_cannot_be_meant(answer, words, hub):
    hub.troubles = repeat(answer)
    error = failure()
    assert f"{REPOSITORY}@main: {SHARD.format(1)}: the hub's answer is not understood" in error.message
    assert words in error.message
    assert hub.pauses == []


@pytest.fixture
def cdn(files, hub):
    """Another server that holds the shards, and to which the hub refers for them."""
    with serve(files) as (handler, endpoint):
        prefix = f"{endpoint}/{REPOSITORY}/resolve/{COMMIT}"
        hub.troubles = repeat(
            lambda hub, path: hub.reply(302, b"", {"Location": f"{prefix}/{path.name}?X-Amz-Signature=s3cret"})
        )
        yield handler


def test_a_redirect_is_followed_without_the_token(cdn, files, hub):
    assert catalogue(open_remote(REPOSITORY, "main").checkpoint) == catalogue(open_checkpoint(files))
    assert hub.served.keys() == {"config.json", INDEX}
    assert {one.headers["authorization"] for one in shard_requests(hub)} == {f"Bearer {TOKEN}"}
    assert len(shard_requests(cdn)) == 3
    for request in cdn.requests:
        assert "authorization" not in request.headers
        assert TOKEN not in json.dumps(request.headers)
        assert request.headers["range"] == "bytes=0-65535"


@pytest.mark.parametrize("status", [403, 410])
def test_a_signed_address_is_not_shown(status, cdn, hub):
    cdn.status = status
    error = failure()
    assert f"{status} " in error.message
    assert "s3cret" not in str(error)


def test_a_redirect_that_goes_in_circles(hub):
    hub.troubles = repeat(lambda hub, path: hub.reply(302, b"", {"Location": hub.path}))
    assert "cannot be fetched (Exceeded maximum allowed redirects" in failure().message


def test_a_redirect_to_a_file_of_ours_is_not_followed(hub):
    hub.troubles = repeat(lambda hub, path: hub.reply(302, b"", {"Location": "file:///etc/passwd"}))
    assert "cannot be fetched" in failure().message


@pytest.mark.parametrize(
    ("status", "error_code", "words"),
    [
        (404, "RepoNotFound", "no such repository"),
        (404, "RevisionNotFound", "no such revision"),
        (401, "RepoNotFound", "no such repository, or it is private"),
        (401, "", "cannot be fetched (Client error '401"),
        (403, "GatedRepo", "gated"),
        (403, "", "cannot be fetched (403 Forbidden"),
        (500, "", "cannot be fetched (Server error '500"),
    ],
)
@pytest.mark.parametrize("of_shards", [False, True])
def test_refusals_of_the_hub_are_said_clearly(of_shards, status, error_code, words, hub):
    headers = {"X-Error-Code": error_code}
    if of_shards:
        hub.troubles = repeat(lambda hub, path: hub.reply(status, b"{}", headers))
    else:
        hub.status, hub.error_code = status, error_code
    error = failure()
    assert words in error.message
    assert ("hf auth login" in error.remedy) == (status in {401, 403} or error_code == "RepoNotFound")
    num_asked = 4 if status == 500 else 1
    if not of_shards:
        assert len(hub.requests) == num_asked
        assert hub.pauses == ([1, 2, 4] if status == 500 else [])


def test_a_document_that_is_refused(hub, files):
    hub.answer_file = lambda self, path: self.reply(403, b"{}", {"X-Error-Code": "GatedRepo"})
    error = failure()
    assert error.message == f"{REPOSITORY}@main: config.json: the repository is gated"


def busy(status, **headers):
    return lambda hub, path: hub.reply(status, b"{}", {key.replace("_", "-"): value for key, value in headers.items()})


def hang_up(hub: Hub, path):
    hub.connection.shutdown(socket.SHUT_RDWR)


def reset(hub: Hub, path):
    hub.send_head(206, {"Content-Range": f"bytes 0-65535/{path.stat().st_size}", "Content-Length": "65536"})
    hub.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    hub.connection.close()


def break_off(hub: Hub, path):
    headers = {"Content-Range": f"bytes 0-65535/{path.stat().st_size}", "Content-Length": "65536"}
    hub.send_part(path, 206, (0, 1000), headers)


def send_too_little(hub: Hub, path):
    headers = {"Content-Range": f"bytes 0-999/{path.stat().st_size}", "Content-Length": "1000"}
    hub.send_part(path, 206, (0, 1000), headers)


@pytest.mark.parametrize("trouble", [busy(429), busy(500), busy(503), hang_up, reset, break_off, send_too_little])
def test_what_passes_is_asked_again(trouble, files, hub):
    hub.troubles = iter([trouble])
    assert catalogue(open_remote(REPOSITORY, "main").checkpoint) == catalogue(open_checkpoint(files))
    assert (hub.pauses, len(shard_requests(hub))) == ([1], 4)


@pytest.mark.parametrize(
    ("trouble", "pause"),
    [
        (busy(429, Retry_After="17"), 17),
        (busy(503, Retry_After="0"), 1),
        (busy(429, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"), 1),
        (busy(429, RateLimit='"resolvers";r=0;t=55'), 55),
        (busy(429, RateLimit='"resolvers";r=3;t=55'), 1),
    ],
)
def test_the_hub_says_how_long_to_wait(trouble, pause, hub):
    hub.troubles = iter([trouble])
    open_remote(REPOSITORY, "main")
    assert hub.pauses == [pause]


def test_a_long_pause_is_not_made_in_silence(hub):
    hub.troubles = repeat(busy(429, Retry_After="3600"))
    assert "429 Too Many Requests" in failure().message
    assert hub.pauses == []


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (hang_up, "cannot be fetched (Server disconnected"),
        (break_off, "cannot be fetched (peer closed connection"),
        (send_too_little, "cannot be fetched (the body ends after 1000 of 65536 bytes)"),
    ],
)
def test_what_does_not_pass_is_said(trouble, words, hub):
    hub.troubles = repeat(trouble)
    assert f"{SHARD.format(1)}: {words}" in failure().message


def test_the_first_name_is_reported_whatever_fails_first(hub):
    def trouble(hub: Hub, path):
        hub.reply(403 if path.name == SHARD.format(2) else 404, b"{}", {})

    hub.troubles = repeat(trouble)
    assert {failure().message.split(": ")[1] for _ in range(5)} == {SHARD.format(1)}


def test_nobody_answers(hub, client):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        client(f"http://127.0.0.1:{unused.getsockname()[1]}")
        assert "cannot be fetched ([Errno" in failure().message


def test_offline(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in failure().message
    assert hub.requests == []


def test_no_hub_id(hub):
    assert "is not a hub id" in failure(hub_id="org/name/more").message


def test_the_token_is_not_repeated(hub):
    hub.troubles = repeat(
        lambda hub, path: hub.reply(
            400, b"{}", {"X-Error-Message": f"bad token {hub.headers['Authorization']}, {TOKEN}"}
        )
    )
    failure()
    hub.troubles = repeat(lambda hub, path: hub.reply(403, b"{}", {"X-Error-Message": f"{TOKEN} may not"}))
    assert "the token may not" in failure().message


def test_a_password_in_the_endpoint_is_not_shown(hub, client):
    client(constants.ENDPOINT.replace("http://", "http://user:password@"))
    hub.status = 418
    assert "password" not in failure().message


@pytest.mark.parametrize(
    "info",
    [
        b"<html>log in</html>",
        b"[]",
        b"{}",
        json.dumps({"id": REPOSITORY, "siblings": []}).encode(),
        json.dumps({"id": REPOSITORY, "sha": "../../main", "siblings": []}).encode(),
        json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": [{}]}).encode(),
        json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": [{"rfilename": 3}]}).encode(),
        json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": [{"rfilename": "x" * 2000}]}).encode(),
        json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": [{"rfilename": "\ud800"}]}).encode(),
        json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": [{"rfilename": "x", "size": -1}]}).encode(),
        json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": [{"rfilename": "x", "size": "1"}]}).encode(),
        json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": [{"rfilename": "x", "size": True}]}).encode(),
        json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": [{"rfilename": "x", "lfs": {"size": 1}}]}).encode(),
    ],
)
def test_an_answer_of_something_else(info, hub):
    hub.answer = lambda self: self.reply(200, info, {})
    error = failure()
    assert "the hub's answer is not understood" in error.message
    assert "HF_ENDPOINT" in error.remedy


def test_a_document_too_large_to_be_one_is_not_downloaded(files, hub):
    os.truncate(files / INDEX, (1 << 30) + 1)
    error = failure()
    assert (error.message, error.file) == ("is too large to be JSON", f"{REPOSITORY}@main: {INDEX}")
    assert len(hub.requests) == 1


def drop_config(directory):
    (directory / "config.json").unlink()


def spoil_config(directory):
    (directory / "config.json").write_text('{"a": NaN}')


def two_quantizations(directory):
    text = {"quantization_config": {"quant_method": "awq"}}
    config = {"quantization_config": {"quant_method": "fp8"}, "text_config": text}
    (directory / "config.json").write_text(json.dumps(config))


def contradicting_modelopt(directory):
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))


def drop_shard(directory):
    (directory / SHARD.format(2)).unlink()


def drop_shard_and_index(directory):
    drop_shard(directory)
    without_index(directory)


def drop_all_shards(directory):
    for path in directory.glob("*.safetensors*"):
        path.unlink()


def add_shard(directory):
    shutil.copy(directory / SHARD.format(1), directory / "zz.safetensors")


def add_shard_without_index(directory):
    add_shard(directory)
    without_index(directory)


def impossible_number(directory):
    without_index(directory)
    (directory / SHARD.format(3)).rename(directory / SHARD.format(4))


def change_index(change):
    def apply(directory):
        weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
        change(weight_map)
        write_index(directory, weight_map)

    apply.__name__ = f"index_with_{change.__name__}"
    return apply


def a_stranger(weight_map):
    weight_map["stranger"] = SHARD.format(1)


def one_less(weight_map):
    del weight_map["layers.1.a"]


def one_elsewhere(weight_map):
    weight_map["layers.1.a"] = SHARD.format(2)


def a_path(weight_map):
    weight_map["layers.1.a"] = "../../" + SHARD.format(2)


def no_string(weight_map):
    weight_map["layers.1.a"] = 3


def second_index(directory):
    (directory / INDEX).rename(directory / "a.safetensors.index.json")
    shutil.copy(directory / "a.safetensors.index.json", directory / "b.safetensors.index.json")


def empty_shard_file(directory):
    (directory / SHARD.format(2)).write_bytes(b"")


def short_shard_file(directory):
    (directory / SHARD.format(2)).write_bytes(b"1234567")


def cut_shard(directory):
    os.truncate(directory / SHARD.format(2), SHARD_BYTES // 2)


def longer_shard(directory):
    os.truncate(directory / SHARD.format(2), SHARD_BYTES * 2)


def header_claims(length):
    def apply(directory):
        with (directory / SHARD.format(2)).open("r+b") as stream:
            stream.write(struct.pack("<Q", length))

    apply.__name__ = f"header_claims_{length}"
    return apply


def unsupported_dtype(directory):
    content = (directory / SHARD.format(2)).read_bytes()[:1000]
    with (directory / SHARD.format(2)).open("r+b") as stream:
        stream.write(content.replace(b"F8_E4M3", b"F8_E9M9"))


WRONG = [
    *(drop_config, spoil_config, two_quantizations, contradicting_modelopt),
    *(drop_shard, drop_shard_and_index, drop_all_shards, add_shard, add_shard_without_index, impossible_number),
    *map(change_index, (a_stranger, one_less, one_elsewhere, a_path, no_string)),
    *(second_index, empty_shard_file, short_shard_file, cut_shard, longer_shard, unsupported_dtype),
    *map(header_claims, (0, 10, 20 * MIB, SHARD_BYTES * 2, 100_000_001, 2**64 - 1)),
]


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_a_repository_is_refused_in_the_words_for_a_directory(change, files, client):
    change(files)
    with pytest.raises(SourceError) as caught:
        open_checkpoint(files)
    local = caught.value
    with serve(files) as (handler, endpoint):
        client(endpoint)
        remote = failure("v1.0")
    assert (remote.message, remote.tensor) == (local.message, local.tensor)
    is_about_all = local.file == str(files)
    assert remote.file == f"{REPOSITORY}@v1.0" + ("" if is_about_all else f": {local.file}")
    served = [num_bytes for name, num_bytes in handler.served.items() if name.endswith(".safetensors")]
    assert all(num_bytes <= 21 * MIB for num_bytes in served)


def test_a_folder_is_no_shard(files, hub):
    without_index(files)
    (files / "model.safetensors").mkdir()
    (files / "model.safetensors" / "part").write_bytes(b"")
    assert failure().message == "is a folder, not a file"


def test_an_index_that_is_a_folder_is_missing(files, hub):
    without_index(files)
    (files / INDEX).mkdir()
    (files / INDEX / "part").write_bytes(b"")
    assert failure().message == "is missing"


def drip(hub: Hub, path):
    """A body that never ends, some bytes at a time."""
    hub.send_head(206, {"Content-Range": f"bytes 0-{MIB - 1}/{path.stat().st_size}", "Content-Length": str(MIB)})
    with contextlib.suppress(ConnectionError):
        while True:
            hub.wfile.write(b"\0" * 64)
            threading.Event().wait(0.01)


def test_a_hub_that_drips_is_not_waited_for(hub, monkeypatch):
    monkeypatch.setattr(http_range, "_SLOWEST_START", 0.2)
    hub.troubles = repeat(drip)
    with pytest.raises(SourceError, match=r"cannot be fetched \(only \d+ of \d+ bytes came in 0.2 s\)"):
        open_remote(REPOSITORY, "main")
