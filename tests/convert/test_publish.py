"""An output is uploaded by the real client to a local server, without Xet; the bytes that arrive are the output's."""

import json
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants
from huggingface_hub.utils import enable_progress_bars, logging

from quantkit.convert.conversion import Conversion
from quantkit.convert.convert import convert_checkpoint
from quantkit.convert.publish import PushTarget, prepare, publish_output
from quantkit.errors import SourceError, UsageError, VerificationError
from tests.convert.helpers import directory_bytes, start_command
from tests.convert.plans import plan_of
from tests.convert.upload_server import TOKEN, Repository, UploadHub, serve_uploads

# the client's own use of httpx
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
NAME = "org/tiny-int4"
SHARDS = 4


@pytest.fixture
def source(tiny_checkpoint):
    made = tiny_checkpoint(num_shards=SHARDS)
    (made.directory / "inference").mkdir()
    for name in ("chat_template.jinja", "inference/model.py"):
        (made.directory / name).write_text(name)
    (made.directory / "README.md").write_text("---\nlicense: mit\n---\n# Source\n")
    return made.directory


@pytest.fixture
def output(source, tmp_path):
    convert_checkpoint(conversion(source, tmp_path / "out"))
    return tmp_path / "out"


@pytest.fixture
def hub(monkeypatch):
    """The server, with the client pointed at it; it makes no pauses."""
    with serve_uploads() as (handler, endpoint):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield handler
        close_session()
    enable_progress_bars()
    logging.set_verbosity_warning()


def conversion(source, target, **changes):
    return Conversion(plan=plan_of(source, **changes), target=target, num_jobs=2)


def push(output, *, public=False):
    target = PushTarget(hub_id=NAME, is_public=public)
    return publish_output(output, target, num_jobs=2, shows_bars=False, report_progress=lambda _, __: None)


def sent(hub: type[UploadHub]) -> list[str]:
    """Objects that came by LFS, by their hashes."""
    return [path.rpartition("/")[2] for method, path in hub.requests if method == "PUT"]


def test_the_bytes_that_arrive_are_the_outputs_and_private(output, hub):
    before, times = directory_bytes(output), {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    report = push(output)
    repository = hub.repositories[NAME]
    assert repository.files == {**before, ".gitattributes": repository.files[".gitattributes"]}
    assert repository.private
    assert len(repository.lfs) == len(sent(hub)) == SHARDS
    assert report.num_files == report.num_sent == len(before)
    assert report.num_bytes == sum(map(len, before.values()))
    assert (report.commit, report.is_public) == (repository.commits[-1], False)
    assert directory_bytes(output) == before
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == times


def test_public_is_asked_for(output, hub):
    assert push(output, public=True).is_public
    assert not hub.repositories[NAME].private


def test_a_second_push_sends_nothing(output, hub):
    push(output)
    head = hub.repositories[NAME].commits[-1]
    hub.requests.clear()
    report = push(output)
    assert (report.num_sent, report.commit) == (0, head)
    assert not [path for method, path in hub.requests if method == "PUT" or "commit" in path]


@pytest.mark.parametrize("how", ["500", "hangs up"])
def test_an_upload_that_broke_off_goes_on_with_what_is_missing(how, output, hub):
    """The server takes two shards and fails from then on."""
    taken = []

    def fail_after_two(handler: UploadHub):
        if handler.command != "PUT" or (len(taken) < 2 and taken.append(handler.path) is None):
            return False
        if how == "500":
            handler.reply(500, {"error": "InternalError"})
        return True

    hub.trouble = fail_after_two
    with pytest.raises(SourceError, match=NAME) as caught:
        push(output)
    assert "run the same command again" in caught.value.remedy
    assert any("complete" in note for note in caught.value.__notes__)
    assert "secret_signature" not in str(caught.value)
    first = set(hub.objects)
    assert len(first) == 2
    hub.trouble = lambda _: False
    hub.requests.clear()
    push(output)
    assert set(sent(hub)) == set(hub.objects) - first
    assert len(sent(hub)) == SHARDS - 2
    assert directory_bytes(output).items() <= hub.repositories[NAME].files.items()


def test_a_commit_that_was_lost_sends_no_shard_again(output, hub):
    def refuse_commits(handler: UploadHub):
        if "/commit/" in handler.path:
            handler.reply(503, {"error": "Service Unavailable"})
            return True
        return False

    hub.trouble = refuse_commits
    with pytest.raises(SourceError, match="503"):
        push(output)
    hub.trouble = lambda _: False
    hub.requests.clear()
    assert push(output).num_files == len(directory_bytes(output))
    assert sent(hub) == []


def test_files_of_a_part_that_is_there_are_not_sent_again(output, hub):
    content = directory_bytes(output)
    shard = min(name for name in content if name.endswith(".safetensors"))
    push(output)
    repository = hub.repositories[NAME]
    del repository.files[shard], repository.files["config.json"], repository.lfs[shard]
    assert push(output).num_sent == 2
    assert content.items() <= repository.files.items()


@pytest.mark.parametrize(
    ("name", "content"),
    [("pytorch_model.bin", b"x"), ("README.md", b"# Mine\n"), ("model-00001-of-00004.safetensors", b"other")],
)
def test_a_repository_with_other_files_is_left_alone(name, content, output, hub):
    hub.repositories[NAME] = repository = Repository(private=True)
    repository.files[name] = content
    before = dict(repository.files)
    with pytest.raises(UsageError, match="not of this output") as caught:
        push(output)
    assert name in str(caught.value)
    assert repository.files == before
    assert len(repository.commits) == 1


def test_a_shard_of_the_same_length_is_another_file(output, hub):
    push(output)
    repository = hub.repositories[NAME]
    name = min(repository.lfs)
    repository.lfs[name] = "0" * 64
    with pytest.raises(UsageError, match=name):
        push(output)


@pytest.mark.parametrize(("private", "public"), [(False, False), (True, True)])
def test_a_repository_that_others_see_otherwise_is_left_alone(private, public, output, hub):
    hub.repositories[NAME] = Repository(private=private)
    with pytest.raises(UsageError, match="exists and is"):
        push(output, public=public)
    assert len(hub.repositories[NAME].commits) == 1


def test_an_empty_repository_is_filled(output, hub):
    hub.repositories[NAME] = Repository(private=True)
    assert push(output).num_sent == len(directory_bytes(output))


def test_what_others_commit_meanwhile_is_not_written_over(output, hub):
    def commit_before(handler: UploadHub):
        if handler.path.endswith("/batch"):
            handler.repositories[NAME].commits.append("1" * 40)
        return False

    hub.trouble = commit_before
    with pytest.raises(SourceError, match="meanwhile"):
        push(output)
    assert set(hub.repositories[NAME].files) == {".gitattributes"}


@pytest.mark.parametrize("damage", ["changed", "gone", "manifest"])
def test_a_damaged_output_is_not_uploaded(damage, output, hub):
    path = output / ("conversion.json" if damage == "manifest" else "model-00001-of-00004.safetensors")
    if damage == "gone":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[0 if damage == "manifest" else -1] ^= 1
        path.write_bytes(content)
    with pytest.raises(VerificationError):
        push(output)
    assert hub.requests == []


@pytest.mark.parametrize("mark", ["is_incomplete", "partial"])
def test_an_incomplete_output_is_not_uploaded(mark, output, hub):
    manifest = json.loads((output / "conversion.json").read_text())
    (output / "conversion.json").write_text(json.dumps({**manifest, mark: True}))
    with pytest.raises(UsageError, match="lacks weights"):
        push(output)
    assert hub.requests == []


def test_files_that_the_manifest_does_not_name_stay_here(output, hub):
    (output / "notes.txt").write_text("mine")
    push(output)
    assert "notes.txt" not in hub.repositories[NAME].files


def answering(status: int, part: str):
    def answer(handler: UploadHub):
        if part not in handler.path:
            return False
        said = f"told: {handler.headers.get('Authorization')} at http://user:password@proxy/path"
        handler.reply(status, {"error": said})
        return True

    return answer


@pytest.mark.parametrize(
    ("status", "part", "words", "remedy"),
    [
        (401, "create", "does not accept the token", "hf auth login"),
        (403, "create", "may not write", "write access"),
        (403, "preupload", "may not write", "write access"),
        (403, "/lfs/", "may not write", "write access"),
        (404, "api/models", "no such user", "check the name"),
        (409, "/commit/", "another change", "run the same command again"),
        (429, "batch", "fewer requests", "run the same command again"),
        (429, "/commit/", "fewer requests", "run the same command again"),
        (500, "preupload", "in trouble", "run the same command again"),
        (503, "/lfs/", "in trouble", "run the same command again"),
        (507, "/commit/", "in trouble", "run the same command again"),
        (413, "/commit/", "refuses", "run the same command again"),
    ],
)
def test_answers_of_the_hub_are_said_with_a_remedy_and_without_the_token(status, part, words, remedy, output, hub):
    hub.trouble = answering(status, part)
    with pytest.raises(SourceError) as caught:
        push(output)
    text = str(caught.value)
    for one in (words, str(status), NAME):
        assert one in text
    assert remedy in caught.value.remedy
    assert TOKEN not in text
    assert "password" not in text
    assert "secret_signature" not in text
    hub.trouble = lambda _: False
    push(output)


def test_who_asks_is_known_before_anything_is_converted(source, hub, tmp_path, monkeypatch):
    planned, target = conversion(source, tmp_path / "out"), PushTarget(hub_id=NAME)
    assert prepare(planned, target) is None
    hub.role = "read"
    with pytest.raises(SourceError, match="may only read"):
        prepare(planned, target)
    hub.role = "write"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(SourceError, match="does not accept the token") as caught:
        prepare(planned, target)
    assert "hf_wrong" not in str(caught.value)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.hf_api.get_token", lambda: None)
    with pytest.raises(SourceError, match="no token"):
        prepare(planned, target)
    with pytest.raises(UsageError, match="no name on the hub"):
        prepare(planned, PushTarget(hub_id="org/a--b"))
    assert not (tmp_path / "out").exists()


def test_a_hub_that_is_not_there_is_said(output, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(SourceError, match="broke off"):
        push(output)


def test_a_complete_output_of_the_same_run_is_known_again(source, output, hub):
    made = prepare(conversion(source, output), PushTarget(hub_id=NAME))
    assert made is not None
    assert [one.role for one in made.classes] == ["routed_expert"]


@pytest.mark.parametrize("mark", [".quantkit", ".quantkit.done"])
def test_an_output_whose_renaming_was_cut_is_pushed_without_what_is_no_output(mark, source, output, hub):
    (output / mark).mkdir()
    (output / mark / "run.json").write_text("{}")
    assert prepare(conversion(source, output), PushTarget(hub_id=NAME)) is not None
    assert not (output / mark).exists()


@pytest.mark.parametrize("change", ["recipe", "shard", "config", "sidecar", "version"])
def test_an_output_of_another_run_is_refused(change, source, output, hub):
    changes = {}
    if change == "recipe":
        changes = {"group_size": 64}
    elif change == "shard":
        path = source / "model-00001-of-00004.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1  # the same length: only the hash tells
        path.write_bytes(content)
    elif change == "config":
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, "rope_theta": 7}))
    elif change == "sidecar":
        (source / "chat_template.jinja").write_text("another")
    else:
        manifest = json.loads((output / "conversion.json").read_text())
        manifest["tool"]["version"] = "0.0.1"
        (output / "conversion.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match="exists already, and was made"):
        prepare(conversion(source, output, **changes), PushTarget(hub_id=NAME))


def test_a_commit_says_what_a_source_on_the_hub_was(source, tmp_path, hub):
    plan, provenance = plan_of(source), {"hub_id": "org/source", "commit": "a" * 40}
    planned = Conversion(plan=plan, target=tmp_path / "out", num_jobs=2, provenance=provenance)
    convert_checkpoint(planned)
    shutil.rmtree(source)
    assert prepare(planned, PushTarget(hub_id=NAME)) is not None
    for changed in ({**provenance, "commit": "b" * 40}, {**provenance, "hub_id": "org/other"}):
        other = Conversion(plan=plan, target=tmp_path / "out", num_jobs=2, provenance=changed)
        with pytest.raises(UsageError, match="with another source"):
            prepare(other, PushTarget(hub_id=NAME))


def test_an_incomplete_source_is_refused_before_it_is_converted(tiny_checkpoint, tmp_path, hub):
    made = tiny_checkpoint("lacking", write=False)
    for suffix in ("", "_scale_inv"):
        made.remove(f"model.layers.1.mlp.experts.2.up_proj.weight{suffix}")
    made.write()
    planned = conversion(made.directory, tmp_path / "out", allow_incomplete=True)
    with pytest.raises(UsageError, match="lacks weights"):
        prepare(planned, PushTarget(hub_id=NAME))


def start(endpoint, tmp_path, *arguments):
    return start_command(endpoint, tmp_path / "home", TOKEN, *arguments)


def run(endpoint, tmp_path, *arguments):
    process = start(endpoint, tmp_path, *arguments)
    out, err = process.communicate(timeout=120)
    assert TOKEN not in out + err
    return process.returncode, out, err


def test_the_command_converts_and_pushes_and_goes_on(source, tmp_path):
    import jsonschema

    import quantkit.cli

    schema = json.loads((Path(quantkit.cli.__file__).parent / "schemas" / "convert.json").read_text())
    options = (source, "-o", tmp_path / "out", "--push-to", NAME)
    with serve_uploads() as (handler, endpoint):
        handler.trouble = answering(403, "/lfs/")
        code, out, err = run(endpoint, tmp_path, *options, "-q")
        assert (code, out) == (3, "")
        assert "the same command goes on with the upload" in err
        assert "Traceback" not in err
        assert len(err.splitlines()) == 2, err
        before = directory_bytes(tmp_path / "out")
        handler.trouble = lambda hub: False
        code, out, err = run(endpoint, tmp_path, *options, "--json", "-q")
        assert (code, err) == (0, "")
        document = json.loads(out)
        jsonschema.validate(document, schema)
        assert document["published"]["num_sent"] == len(before)
        assert document["errors"][0]["role"] == "routed_expert"
        assert before.items() <= handler.repositories[NAME].files.items()
        code, out, err = run(endpoint, tmp_path, *options)
        assert code == 0, err
        assert "is complete already" in out
        assert "0 files sent now" in out
        assert f"upload: {tmp_path / 'out'} to {NAME}" in err
        code, _, err = run(endpoint, tmp_path, source, "-o", tmp_path / "out")
        assert code == 2
        assert "exists already" in err
        shutil.rmtree(tmp_path / "out")
        code, out, err = run(endpoint, tmp_path, source, "-o", tmp_path / "out", "--push-to", "org/b", "--public")
        assert code == 0, err
        assert "verified and in place" in out
        assert ", public, at commit" in out
        assert not handler.repositories["org/b"].private
    assert directory_bytes(tmp_path / "out") == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_an_upload_that_hangs(number, code, source, tmp_path):
    hangs, done = threading.Event(), threading.Event()

    def hang(handler: UploadHub):
        if handler.command != "PUT":
            return False
        hangs.set()
        done.wait(30)
        return True

    with serve_uploads() as (handler, endpoint):
        handler.trouble = hang
        process = start(endpoint, tmp_path, source, "-o", tmp_path / "out", "--push-to", NAME, "-q")
        assert hangs.wait(60)
        began = time.monotonic()
        process.send_signal(number)
        try:
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
            done.set()
        assert time.monotonic() - began < 5
    assert (process.returncode, out) == (code, "")
    assert "goes on with the upload" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "options",
    [("--public",), ("--push-to", "name"), ("--push-to", "a/b/c"), ("--push-to", NAME, "--rank", 0, "--world-size", 2)],
)
def test_options_that_do_not_go_together_are_refused(options, source, tmp_path):
    code, out, err = run("http://127.0.0.1:9", tmp_path, source, "-o", tmp_path / "out", *options)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()
