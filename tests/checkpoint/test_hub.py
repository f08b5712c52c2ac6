"""A hub repository is fetched by the real client from a local server, and converts like a directory."""

import json
import os
import subprocess
import sys

import pytest

from tests.checkpoint.hub_server import COMMIT, REPOSITORY, serve
from tests.convert.helpers import convert, directory_bytes


@pytest.fixture
def hub(tiny_checkpoint):
    source = tiny_checkpoint("hub-files")
    (source.directory / "pytorch_model.bin").write_bytes(b"never fetched")
    with serve(source.directory) as (handler, endpoint):
        yield handler, endpoint, source


def run(endpoint, tmp_path, *arguments):
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_secret_token", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-c", "from quantkit.cli.app import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)


@pytest.mark.parametrize("source", ["glm-5.2", REPOSITORY, f"{REPOSITORY}@main"])
def test_recipe_and_hub_id_convert_what_the_hub_holds(source, hub, tmp_path):
    _, endpoint, files = hub
    result = run(endpoint, tmp_path, "convert", source, "--to", "int4", "-q", "-o", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    (files.directory / "pytorch_model.bin").unlink()
    convert(files.directory, tmp_path / "direct")
    fetched, direct = directory_bytes(tmp_path / "out"), directory_bytes(tmp_path / "direct")
    for name in fetched.keys() - {"conversion.json", "README.md"}:
        assert fetched[name] == direct[name], name
    assert fetched.keys() == direct.keys()
    manifest = json.loads(fetched["conversion.json"])
    assert (manifest["source"]["hub_id"], manifest["source"]["commit"]) == (REPOSITORY, COMMIT)
    assert manifest["recipe"]["name"] == "glm-5.2"


def test_default_output_is_named_after_the_recipe_or_repository(hub, tmp_path):
    _, endpoint, _ = hub
    assert run(endpoint, tmp_path, "convert", "glm-5.2", "-q").returncode == 0
    assert (tmp_path / "glm-5.2-int4").is_dir()
    assert run(endpoint, tmp_path, "convert", REPOSITORY, "-q").returncode == 0
    assert (tmp_path / "GLM-5.2-FP8-int4").is_dir()


@pytest.mark.parametrize("command", [["plan"], ["convert", "--dry-run"]])
def test_a_plan_reads_headers_and_downloads_no_shard(command, hub, tmp_path):
    handler, endpoint, files = hub
    result = run(endpoint, tmp_path, *command, "glm-5.2", "--json")
    assert result.returncode == 0, result.stderr
    local = run(endpoint, tmp_path, "plan", files.directory, "--recipe", "glm-5.2", "--json")
    planned, expected = json.loads(result.stdout), json.loads(local.stdout)
    for key in ("source", "output", "parts", "rules", "tensor_parallel", "warnings"):
        assert planned[key] == expected[key], key
    shards = [request for request in handler.requests if request.name.endswith(".safetensors")]
    assert shards
    assert all("range" in request.headers for request in shards)
    assert not list((tmp_path / "home").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("status", "error_code", "words"),
    [
        (404, "RepoNotFound", "no such repository"),
        (404, "RevisionNotFound", "no such revision"),
        (401, "RepoNotFound", "no such repository, or it is private"),
        (403, "GatedRepo", "gated"),
        (403, "", "cannot be fetched"),
        (500, "", "cannot be fetched"),
    ],
)
def test_refusals_of_the_hub_are_said_clearly(status, error_code, words, hub, tmp_path):
    handler, endpoint, _ = hub
    handler.status, handler.error_code = status, error_code
    result = run(endpoint, tmp_path, "convert", "glm-5.2", "-q")
    assert result.returncode == 3, result.stderr
    assert words in result.stderr
    assert "hf_secret_token" not in result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "glm-5.2-int4").exists()
