"""`quantkit serve-plan` as a user meets it: exit codes, the document, the files."""

import json

import jsonschema
import pytest
import yaml

from tests.cli.test_commands import SCHEMAS, document, run

CHECKED = json.loads((SCHEMAS / "memory-plan.json").read_text())


@pytest.fixture
def converted(tiny_checkpoint, tmp_path):
    """A source with an MTP layer, and its conversion."""
    source = tiny_checkpoint(mtp=True).directory
    assert run("convert", source, "-o", tmp_path / "out", "-q").returncode == 0
    return source, tmp_path / "out"


def test_a_pair_of_a_conversion_and_its_source(converted):
    source, output = converted
    result = run("serve-plan", output, "--prefill", source, "--tp", "1", "--estimate", "--json")
    assert result.returncode == 0, result.stderr
    found = document(result, "serve-plan")
    assert [pool["role"] for pool in found["pools"]] == ["prefill", "decode"]
    for pool in found["pools"]:
        jsonschema.validate(pool["memory"], CHECKED)
    assert [pool["model_path"] for pool in found["pools"]] == [str(source), str(output)]
    assert found["pools"][1]["loading"]["worst"] == "loads"
    servers = {server["name"]: server for server in found["servers"]}
    assert list(servers) == ["prefill", "decode", "router"]
    for server in servers.values():
        words = [word for one in server["flags"] for word in (one["flag"], *one["values"])]
        assert server["argv"][-len(words) :] == words
        assert all(one["why"] for one in server["flags"])
    assert ["--kv-cache-dtype", "fp8_e4m3"] in found["agreed"]
    assert ["--speculative-algorithm", "EAGLE"] in found["agreed"]
    steps = found["estimate"]["steps"]
    assert [one["concurrency"] for one in steps] == [1, 8, 16, 32, 64]
    assert steps[0]["unique_experts"] == 2


def test_text_has_lines_to_paste_and_says_what_is_not_known(converted):
    source, output = converted
    result = run("serve-plan", output, "--prefill", source, "--tp", "1", "--estimate")
    assert result.returncode == 0, result.stderr
    for words in ("Memory of every rank", "--mem-fraction-static", '"${decode[@]}"', "# one half of a pair"):
        assert words in result.stdout
    assert "launches, skewed routing" in result.stdout
    assert "no server was started" in result.stderr
    assert "--kv-cache-dtype fp8_e4m3" in result.stdout


def test_another_source_than_the_recorded_one_is_noted(converted, tiny_checkpoint):
    _, output = converted
    other = tiny_checkpoint("other", mtp=True)
    config = json.loads((other.directory / "config.json").read_text())
    (other.directory / "config.json").write_text(json.dumps(config | {"rope_theta": 10_000}))
    result = run("serve-plan", output, "--prefill", other.directory, "--tp", "1")
    assert result.returncode == 0, result.stderr
    assert "is not the source" in result.stderr


def test_templates_go_to_stdout_and_nothing_else_does(converted):
    source, output = converted
    command = ("serve-plan", output, "--prefill", source, "--tp", "1")
    compose = run(*command, "--template", "compose")
    assert list(yaml.safe_load(compose.stdout)["services"]) == ["prefill", "decode", "router"]
    argv = document(run(*command, "--json"), "serve-plan")["servers"][1]["argv"]
    assert yaml.safe_load(compose.stdout)["services"]["decode"]["entrypoint"] == argv
    assert run(*command, "--template", "shell").stdout.startswith("#!/usr/bin/env bash\n")
    as_json = document(run(*command, "--template", "k8s", "--json"), "serve-plan")
    assert as_json["template"]["kind"] == "k8s"


def test_what_does_not_fit_is_exit_5_and_no_template(converted):
    _, output = converted
    command = ("serve-plan", output, "--tp", "1", "--gpu-gib", "8", "--concurrency", "900000", "--context", "512")
    result = run(*command)
    assert result.returncode == 5
    assert "does not fit: " in result.stderr
    assert "Memory of every rank" in result.stdout
    assert document(run(*command, "--json"), "serve-plan")["status"] == "failed"
    templated = run(*command, "--template", "shell")
    assert (templated.returncode, templated.stdout) == (5, "")
    allowed = run(*command, "--template", "shell", "--allow-overcommit")
    assert allowed.returncode == 0
    assert "does not fit" in allowed.stderr


def test_what_the_engine_refuses_is_exit_4(converted):
    _, output = converted
    result = run("serve-plan", output, "--tp", "1", "--backend", "deepep")
    assert result.returncode == 4
    assert "--format w4afp8" in result.stderr


def test_a_damaged_manifest_is_exit_4(converted):
    _, output = converted
    (output / "conversion.json").write_text("{")
    assert run("serve-plan", output, "--tp", "1").returncode == 4
    (output / "conversion.json").unlink()  # another tool's
    assert run("serve-plan", output, "--tp", "1").returncode == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--engine", "tgi"), "--engine tgi is not known"),
        (("--gpu", "h3000"), "unknown GPU"),
        (("--tp", "3"), "cannot split"),
        (("--template", "nomad"), "--template nomad is not known"),
        (("--engine", "vllm", "--prefill", "x"), "--prefill is an option of sglang"),
        (("--gpu-memory-utilization", "0.9"), "is an option of vllm"),
        (("--prefill-tp", "0"), "is no size"),
        (("--tp", "1", "--host", "a,b"), "names 2 hosts"),
        (("--port", "0"), "is no port"),
        (("--max-running-requests", "0"), "is no count"),
        (("--kv-dtype", "fp4"), "--kv-dtype fp4 is not known"),
        (("--ib-device", "mlx5_0"), "name a --prefill pool"),
    ],
)
def test_options_that_cannot_be_meant(options, words, tiny_checkpoint):
    result = run("serve-plan", tiny_checkpoint().directory, *options)
    assert result.returncode == 2, result.stderr
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_path_that_no_line_holds(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint("two\nlines").directory
    result = run("serve-plan", source, "--tp", "1")
    assert result.returncode == 2
    assert "cannot stand in a launch line" in result.stderr
