"""A hub repository is converted without ever being here whole: the real client, a local server, faults on the way."""

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from itertools import repeat
from types import SimpleNamespace

import pytest
from huggingface_hub import close_session, constants

from quantkit.checkpoint import http_range
from quantkit.checkpoint.output import WORK_NAME
from quantkit.convert import journal
from quantkit.convert import spool as spool_module
from quantkit.convert.conversion import Conversion
from quantkit.convert.convert import convert_checkpoint
from quantkit.convert.ranks import convert_share, finalize
from quantkit.errors import ResourceError, SourceError, UsageError
from quantkit.plan.limits import Limits
from quantkit.plan.make import make_plan
from quantkit.plan.part import limited
from quantkit.sources import resolve_source
from tests.checkpoint.hub_server import COMMIT, REPOSITORY, Hub, serve
from tests.convert.helpers import directory_bytes, start_command

TOKEN = "hf_secret_token"
SHARDS = [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]


@pytest.fixture(params=[{}, {"scale_only_shard": True}, {"fused_experts": True}], ids=["plain", "scales", "fused"])
def any_source(request, tiny_checkpoint):
    """Weights whose scales lie in other shards, or all in one."""
    return with_sidecars(tiny_checkpoint(num_shards=4, **request.param))


@pytest.fixture
def source(tiny_checkpoint):
    return with_sidecars(tiny_checkpoint(num_shards=4))


def with_sidecars(made):
    for name in ("chat_template.jinja", "inference/model.py", ".gitattributes", "old/__pycache__/x.pyc", "README.md"):
        (made.directory / name).parent.mkdir(parents=True, exist_ok=True)
        (made.directory / name).write_text(name)
    (made.directory / "pytorch_model.bin").write_bytes(b"pickled")
    return made


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Points the client at an endpoint; it makes no pauses."""

    def point(endpoint):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 3)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 14)
    monkeypatch.setattr(http_range, "_PAUSES", (0, 0, 0))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield point
    close_session()


@pytest.fixture
def hub(source, client):
    """The repository of ``source``."""
    with serve(source.directory) as (handler, endpoint):
        handler.lists_hashes = True
        client(endpoint)
        yield handler


def conversion(target, *, keeps_source=False, **changes):
    resolved = resolve_source(REPOSITORY, headers_only=not keeps_source)
    plan = make_plan(resolved.recipe, resolved.family, resolved.checkpoint)
    chosen = {"plan": plan, "target": target, "num_jobs": 2, "provenance": resolved.provenance}
    return Conversion(**chosen, repository=resolved.repository, **changes)


def convert(target, **changes):
    return convert_checkpoint(conversion(target, **changes))


def largest(source):
    return max(path.stat().st_size for path in source.directory.glob("*.safetensors"))


def shard_requests(handler):
    return [one for one in handler.requests if one.method == "GET" and one.name.endswith(".safetensors")]


@pytest.mark.parametrize("room", [1.0, 2.5, 100.0])
def test_the_bytes_are_those_of_a_whole_download_and_the_spool_keeps_its_bound(
    room, any_source, client, tmp_path, monkeypatch
):
    most_bytes, seen = int(room * largest(any_source)), []
    fetch = spool_module.Spool._fetch_checked

    def measured(self, *arguments):
        fetched = fetch(self, *arguments)
        with suppress(FileNotFoundError):  # another is just being dropped
            seen.append(sum(path.stat().st_size for path in self.files.glob("*.safetensors")))
        return fetched

    monkeypatch.setattr(spool_module.Spool, "_fetch_checked", measured)
    with serve(any_source.directory) as (handler, endpoint):
        handler.lists_hashes = True
        client(endpoint)
        convert(tmp_path / "out", spool_bytes=most_bytes)
        assert not any((tmp_path / "cache").rglob("*.safetensors"))
        streamed = directory_bytes(tmp_path / "out")
        convert(tmp_path / "whole", keeps_source=True)
    assert streamed == directory_bytes(tmp_path / "whole")
    assert 0 < max(seen) <= most_bytes
    assert json.loads(streamed["conversion.json"])["source"]["commit"] == COMMIT
    assert {"chat_template.jinja", "inference/model.py", "SOURCE_README.md"} < set(streamed)


def test_every_shard_is_fetched_once(hub, tmp_path):
    convert(tmp_path / "out", spool_bytes=1 << 30)
    whole = [one.name for one in shard_requests(hub) if "range" not in one.headers]
    assert sorted(whole) == SHARDS


def test_a_spool_that_is_too_small_is_refused_before_a_shard_is_fetched(hub, source, tmp_path):
    with pytest.raises(UsageError, match="does not hold the largest shard") as caught:
        convert(tmp_path / "out", spool_bytes=largest(source) - 1)
    assert "--spool-gib" in caught.value.remedy
    assert not [one for one in shard_requests(hub) if "range" not in one.headers]


def test_a_disk_without_room_for_output_and_spool_is_said_first(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("quantkit.convert.conversion.free_bytes", lambda _: 3 << 20)
    with pytest.raises(ResourceError, match="are free"):
        convert(tmp_path / "out", spool_bytes=1 << 30)
    assert not [one for one in shard_requests(hub) if "range" not in one.headers]


def test_ranks_stream_their_shares(hub, source, tmp_path):
    for rank in range(3):
        convert_share(conversion(tmp_path / "out", rank=rank, world_size=3, spool_bytes=largest(source)))
    assert not hub.served["chat_template.jinja"]  # whoever completes the output needs it
    finalize(conversion(tmp_path / "out"))
    assert hub.served["chat_template.jinja"] == len("chat_template.jinja")
    convert(tmp_path / "whole", keeps_source=True)
    assert directory_bytes(tmp_path / "out") == directory_bytes(tmp_path / "whole")


def answer_status(status, **headers):
    return lambda hub, path: hub.reply(status, b"{}", headers)


def hang_up(hub: Hub, path):
    hub.connection.close()


def reset(hub: Hub, path):
    hub.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    hub.connection.close()


def break_off(hub: Hub, path):
    size = path.stat().st_size
    hub.send_head(200, {"Content-Length": str(size)})
    hub.wfile.write(path.read_bytes()[: size // 3])
    hub.close_connection = True


def other_bytes(hub: Hub, path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    hub.send_head(200, {"Content-Length": str(len(content))})
    hub.wfile.write(content)


def whole_shards_only(trouble):
    """In place of an answer to whoever asks for a whole shard; ranges are served."""

    def answer(hub: Hub, path):
        if "Range" in hub.headers:
            serve_as_it_is(hub, path)
        else:
            trouble(hub, path)

    return answer


def serve_as_it_is(hub: Hub, path):
    kept, hub.troubles = hub.troubles, iter(())
    try:
        Hub.answer_file(hub, path)
    finally:
        hub.troubles = kept


@pytest.mark.parametrize(
    "trouble",
    [
        answer_status(429, **{"Retry-After": "0"}),
        answer_status(500),
        answer_status(503),
        answer_status(403),
        hang_up,
        reset,
        break_off,
        other_bytes,
    ],
    ids=["429", "500", "503", "an expired link", "hung up", "reset", "broken off", "other bytes"],
)
def test_what_passes_is_asked_again(trouble, hub, source, tmp_path):
    planned = conversion(tmp_path / "out", spool_bytes=largest(source))
    troubled = []

    def once(handler: Hub, path):
        if "Range" in handler.headers or troubled:
            serve_as_it_is(handler, path)
        else:
            troubled.append(path.name)
            trouble(handler, path)

    hub.troubles = repeat(once)
    convert_checkpoint(planned)
    assert troubled
    if trouble is break_off:  # the rest alone is asked for
        ranges = [one.headers.get("range", "") for one in shard_requests(hub) if one.name == troubled[0]]
        assert any(re.fullmatch(r"bytes=[1-9]\d+-", text) for text in ranges)
    hub.troubles = iter(())
    convert(tmp_path / "whole", keeps_source=True)
    assert directory_bytes(tmp_path / "out") == directory_bytes(tmp_path / "whole")


def wait_for_a_shard(work):
    """Until one is finished; a test that waits in vain fails by what it asks afterwards."""
    until = time.monotonic() + 10
    while time.monotonic() < until and not journal.read_journals(work).outputs:
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("trouble", "words", "remedy"),
    [
        (answer_status(401), "401", "log in"),
        (answer_status(403), "403", "log in"),
        (answer_status(404, **{"X-Error-Code": "EntryNotFound"}), "404", "run the same command again"),
        (answer_status(429), "429", "run the same command again"),
        (answer_status(500), "500", "run the same command again"),
        (hang_up, "disconnected", "run the same command again"),
        (other_bytes, "and the hub lists", "fetched twice"),
    ],
    ids=["401", "403", "404", "429", "500", "hung up", "other bytes"],
)
def test_what_does_not_pass_is_said_and_the_work_is_kept(trouble, words, remedy, hub, source, tmp_path):
    planned = conversion(tmp_path / "out", spool_bytes=largest(source))
    served = []

    def after_two(handler: Hub, path):
        if "Range" not in handler.headers and (len(served) < 2 or path.name in served):
            served.append(path.name)
        elif "Range" not in handler.headers:
            wait_for_a_shard(tmp_path / "out.partial" / WORK_NAME)  # or there is nothing to go on from
            trouble(handler, path)
            return
        serve_as_it_is(handler, path)

    hub.troubles = repeat(after_two)
    with pytest.raises(SourceError) as caught:
        convert_checkpoint(planned)
    assert words in caught.value.message
    assert remedy in caught.value.remedy
    assert REPOSITORY in str(caught.value)
    assert TOKEN not in str(caught.value)
    assert any("the same command goes on" in note for note in caught.value.__notes__)
    hub.troubles = iter(())
    hub.requests.clear()
    convert_checkpoint(planned)
    again = {one.name for one in shard_requests(hub) if "range" not in one.headers}
    assert again < set(SHARDS)
    convert(tmp_path / "whole", keeps_source=True)
    assert directory_bytes(tmp_path / "out") == directory_bytes(tmp_path / "whole")


def test_a_range_that_is_not_of_the_whole_is_found(hub, source, tmp_path):
    """What was fetched by range is compared when its shard comes."""
    planned = conversion(tmp_path / "out", spool_bytes=largest(source))

    def other_range(handler: Hub, path):
        if "Range" not in handler.headers:
            serve_as_it_is(handler, path)
            return
        begin, end = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
        content = bytearray(path.read_bytes()[begin : end + 1])
        content[0] ^= 1
        size = path.stat().st_size
        headers = {"Content-Range": f"bytes {begin}-{end}/{size}", "Content-Length": str(len(content))}
        handler.send_head(206, headers)
        handler.wfile.write(content)

    hub.troubles = repeat(other_range)
    with pytest.raises(SourceError, match="other bytes for a range of it than for the whole"):
        convert_checkpoint(planned)


def test_a_moved_revision_is_another_run(hub, source, tmp_path, monkeypatch):
    planned = conversion(tmp_path / "out", spool_bytes=1 << 30)
    hub.troubles = repeat(whole_shards_only(answer_status(404)))
    with pytest.raises(SourceError):
        convert_checkpoint(planned)
    moved = SimpleNamespace(**{name: getattr(planned, name) for name in ("plan", "target", "num_jobs", "repository")})
    with pytest.raises(UsageError, match="commit was") as caught:
        convert_checkpoint(Conversion(**vars(moved), provenance={**planned.provenance, "commit": "f" * 40}))
    assert "f" * 40 in str(caught.value)
    assert COMMIT in str(caught.value)


def start(endpoint, tmp_path, *options):
    return start_command(endpoint, tmp_path / "home", TOKEN, REPOSITORY, "-o", tmp_path / "out", *options)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_download_that_drips(number, code, source, tmp_path):
    """In under five seconds, though the client waits for a server that sends a little now and then."""
    dripping = threading.Event()

    def drip(hub: Hub, path):
        if "Range" in hub.headers or path.name == SHARDS[0]:
            serve_as_it_is(hub, path)
            return
        hub.send_head(200, {"Content-Length": str(path.stat().st_size)})
        dripping.set()
        for _ in range(600):
            try:
                hub.wfile.write(b"\0" * 16)
            except OSError:
                return
            time.sleep(0.05)

    with serve(source.directory) as (handler, endpoint):
        handler.lists_hashes = True
        handler.troubles = repeat(drip)
        process = start(endpoint, tmp_path)
        assert dripping.wait(60)
        time.sleep(1)
        began = time.monotonic()
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
        assert time.monotonic() - began < 5
        assert (process.returncode, out) == (code, "")
        assert "Traceback" not in err
        assert TOKEN not in err
        handler.troubles = iter(())
        process = start(endpoint, tmp_path, "-q")
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert not (tmp_path / "out" / WORK_NAME).exists()
    assert not list((tmp_path / "home").rglob("*.safetensors"))


def test_streaming_is_what_the_command_does_and_keeping_is_asked_for(source, tmp_path):
    with serve(source.directory) as (handler, endpoint):
        handler.lists_hashes = True
        for options in ((), ("--keep-source",)):
            process = start(endpoint, tmp_path, "-q", *options)
            _, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
            assert bool(list((tmp_path / "home").rglob("*.safetensors"))) == bool(options)
            (tmp_path / "out").rename(tmp_path / f"out{len(options)}")
    assert directory_bytes(tmp_path / "out0") == directory_bytes(tmp_path / "out1")


def test_a_smoke_run_fetches_only_the_shards_that_it_needs(any_source, client, tmp_path):
    def part(conversion):
        return replace(conversion, plan=limited(conversion.plan, Limits(num_shards=1)))

    with serve(any_source.directory) as (handler, endpoint):
        client(endpoint)
        convert_checkpoint(part(conversion(tmp_path / "part")))
        fetched = {one.name for one in shard_requests(handler) if "range" not in one.headers}
    document = json.loads((tmp_path / "part" / "conversion.json").read_text())
    assert fetched == set(document["source"]["shards"])  # its own, and the one that holds its scales
    assert len(fetched) == 2
    resolved = resolve_source(str(any_source.directory))
    plan = make_plan(resolved.recipe, resolved.family, resolved.checkpoint)
    convert_checkpoint(part(Conversion(plan=plan, target=tmp_path / "local", num_jobs=2)))
    (made,), (expected,) = ([*(tmp_path / name).glob("*.safetensors")] for name in ("part", "local"))
    assert (made.name, made.read_bytes()) == (expected.name, expected.read_bytes())


def stopped_after_one(planned):
    """A streamed run that ends with one shard finished."""
    original = journal.Journal.add_output

    def add_output(recorder, name, entry):
        original(recorder, name, entry)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(journal.Journal, "add_output", add_output)
        convert_checkpoint(planned)


def test_small_files_in_the_spool_are_fetched_again(hub, source, tmp_path):
    """Nobody lists a hash of them, so what lies there is not believed."""
    planned = conversion(tmp_path / "out", spool_bytes=largest(source))
    stopped_after_one(planned)
    path = tmp_path / "out.partial" / WORK_NAME / "spool" / "files" / "chat_template.jinja"
    status = path.stat()
    path.write_text("x" * status.st_size)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    convert_checkpoint(planned)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "chat_template.jinja"


@pytest.mark.parametrize("place", ["spool", "spool/files", "spool/spans", "spool/files/.cache", "spool/files/old"])
def test_no_link_in_the_spool_is_followed(place, hub, source, tmp_path):
    planned = conversion(tmp_path / "out", spool_bytes=largest(source))
    stopped_after_one(planned)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "x.spans").write_text("precious")
    path = tmp_path / "out.partial" / WORK_NAME / place
    if path.is_dir():
        shutil.rmtree(path)
    path.symlink_to(elsewhere)
    convert_checkpoint(planned)
    assert [one.name for one in elsewhere.iterdir()] == ["x.spans"]
    convert(tmp_path / "whole", keeps_source=True)
    assert directory_bytes(tmp_path / "out") == directory_bytes(tmp_path / "whole")


def test_names_of_the_hub_do_not_meet_names_of_the_spool(source, client, tmp_path):
    for name in ("notes.spans/x.md", f"{SHARDS[0]}.spans", "spans/x.md", "files/x.md"):
        (source.directory / name).parent.mkdir(exist_ok=True)
        (source.directory / name).write_text(name)
    with serve(source.directory) as (handler, endpoint):
        handler.lists_hashes = True
        client(endpoint)
        planned = conversion(tmp_path / "out", spool_bytes=largest(source))
        stopped_after_one(planned)
        convert_checkpoint(planned)
        convert(tmp_path / "whole", keeps_source=True)
    assert directory_bytes(tmp_path / "out") == directory_bytes(tmp_path / "whole")
    assert (tmp_path / "out" / f"{SHARDS[0]}.spans").read_text() == f"{SHARDS[0]}.spans"


def test_an_error_ends_the_process_though_other_downloads_stall(source, tmp_path):
    stalled, ended = threading.Event(), threading.Event()

    def trouble(hub: Hub, path):
        if "Range" in hub.headers:
            serve_as_it_is(hub, path)
        elif path.name == SHARDS[0]:
            stalled.wait(20)
            hub.reply(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        else:
            hub.send_head(200, {"Content-Length": str(path.stat().st_size)})
            stalled.set()
            ended.wait(60)

    with serve(source.directory) as (handler, endpoint):
        handler.lists_hashes = True
        handler.troubles = repeat(trouble)
        process = start(endpoint, tmp_path)
        try:
            _, err = process.communicate(timeout=45)
        finally:
            ended.set()
    assert process.returncode == 3
    assert "Traceback" not in err
    assert "404" in err


def test_a_signed_address_is_not_printed(source, tmp_path):
    """The client's own warning of a broken download quotes it."""
    broken = []

    class Signed(Hub):
        def answer_file(self, path):
            if "Signature" not in self.path:
                location = f"{self.path}?X-Amz-Signature=SECRET"
                etag = {"ETag": f'"{hashlib.sha256(path.read_bytes()).hexdigest()}"', "X-Repo-Commit": COMMIT}
                length = {"X-Linked-Size": str(path.stat().st_size)}
                self.reply(302, b"", {"Location": location, **etag, **length})
            elif path.name == "config.json" and self.command == "GET" and len(broken) < 1:
                broken.append(path.name)
                break_off(self, path)
            else:
                super().answer_file(path)

    with serve(source.directory) as (handler, endpoint):
        handler.lists_hashes = True
        handler.__bases__ = (Signed,)
        process = start(endpoint, tmp_path, "-q")
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert broken
    assert "SECRET" not in err
