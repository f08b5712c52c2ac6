"""Every template is valid text of its kind, and its argument vectors are those of the plan."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from quantkit.engines.parallel import Parallel
from quantkit.errors import UsageError
from quantkit.memory.gpus import gpu_named
from quantkit.serving.make import ServePlan, make_serve_plan
from quantkit.serving.request import Network, ServeRequest
from quantkit.serving.templates import TEMPLATES, check_template, render_template
from quantkit.serving.templates.systemd import MARK
from tests.serving.plans import served

AWKWARD = "a b'c\"d%e$f$(g)`h`\\i${j}😀é"


@pytest.fixture
def awkward(tiny_checkpoint) -> ServePlan:
    """A pair whose paths have every character that means something to somebody."""
    source = tiny_checkpoint(AWKWARD, mtp=True).directory
    network = Network(ib_device='{"0": "mlx5_0"}')
    request = ServeRequest(
        output=str(source), prefill=str(source), gpu=gpu_named("h200"), parallel=Parallel(tp=1), network=network
    )
    return make_serve_plan(request)


@pytest.fixture(params=["awkward", "kimi", "vllm"])
def plan(request) -> ServePlan:
    if request.param == "awkward":
        return request.getfixturevalue("awkward")
    if request.param == "kimi":
        return served("kimi-k2-0905", prefill="kimi-k2-0905", prefill_tp=16)
    return served("glm-5.2", engine="vllm")


def test_the_script_becomes_each_server(plan, tmp_path):
    script = tmp_path / "serve.sh"
    script.write_text(render_template("shell", plan))
    subprocess.run(["bash", "-n", str(script)], check=True)
    (tmp_path / "bin").mkdir()
    for program in ("python", "vllm"):
        stub = tmp_path / "bin" / program
        stub.write_text('#!/bin/sh\nprintf "%s\\0" "$(basename "$0")" "$@"\n')
        stub.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    for server in plan.servers:
        result = subprocess.run(["bash", str(script), server.name], capture_output=True, check=True, env=environment)
        assert tuple(result.stdout.decode().split("\0")[:-1]) == server.argv
    assert subprocess.run(["bash", str(script)], capture_output=True, check=False).returncode == 2
    words = shlex.split(script.read_text(), comments=True)
    for server in plan.servers:
        assert set(server.argv) <= set(words)


def exec_start(unit: str) -> tuple[str, ...]:
    """The words of ExecStart as systemd.syntax(7) and systemd.service(5) read them."""
    lines = [line for line in unit.splitlines() if not line.lstrip().startswith(("#", ";"))]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    command = next(line for line in joined.splitlines() if line.startswith("ExecStart=")).removeprefix("ExecStart=")
    words = re.findall(r'"((?:[^"\\]|\\.)*)"', command)
    assert re.sub(r'"((?:[^"\\]|\\.)*)"', "", command).strip() == ""
    plain = []
    for word in words:
        assert not re.search(r"(?<!%)(?:%%)*%(?!%)", word), word
        assert not re.search(r"(?<!\$)(?:\$\$)*\$(?!\$)", word), word
        plain.append(re.sub(r"\\(.)", r"\1", word).replace("%%", "%").replace("$$", "$"))
    return tuple(plain)


def units_of(text: str) -> dict[str, str]:
    parts = re.split(rf"^{re.escape(MARK)}(\S+).*$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_units_start_each_server(plan, tmp_path):
    units = units_of(render_template("systemd", plan))
    assert list(units) == [f"quantkit-{server.name}.service" for server in plan.servers]
    for server, (name, unit) in zip(plan.servers, units.items(), strict=True):
        assert exec_start(unit) == server.argv
        sections = re.findall(r"^\[(\w+)\]$", unit, flags=re.MULTILINE)
        assert sections == ["Unit", "Service", "Install"]
        (tmp_path / name).write_text(unit)
        if shutil.which("systemd-analyze"):
            verify = ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)]
            said = subprocess.run(verify, capture_output=True, text=True, check=False).stderr
            # the engines are not here
            about = [line for line in said.splitlines() if name in line and "is not executable" not in line]
            assert not about, said


def test_compose_starts_each_server(plan):
    document = yaml.safe_load(render_template("compose", plan))
    assert list(document["services"]) == [server.name for server in plan.servers]
    for server in plan.servers:
        service = document["services"][server.name]
        assert not [word for word in service["entrypoint"] if re.search(r"(?<!\$)(?:\$\$)*\$(?!\$)", word)]
        assert tuple(word.replace("$$", "$") for word in service["entrypoint"]) == server.argv
        assert service["command"] == []
        assert service["profiles"] == [server.name]
        if server.num_gpus:
            devices = service["deploy"]["resources"]["reservations"]["devices"]
            assert devices[0]["count"] == server.num_gpus
        for directory, volume in zip(server.directories, service.get("volumes", []), strict=True):
            source = volume["source"].replace("$$", "$")
            assert source == str(Path(directory).absolute())
            inside = Path(service["working_dir"]) / directory
            assert volume["target"].replace("$$", "$") == str(inside)


def test_manifests_start_each_server(plan):
    documents = [one for one in yaml.safe_load_all(render_template("k8s", plan)) if one is not None]
    deployments = [one for one in documents if one["kind"] == "Deployment"]
    assert len(deployments) == len(plan.servers)
    services = {one["metadata"]["name"]: one for one in documents if one["kind"] == "Service"}
    for server, deployment in zip(plan.servers, deployments, strict=True):
        pod = deployment["spec"]["template"]
        container = pod["spec"]["containers"][0]
        assert not [word for word in container["command"] if re.search(r"(?<!\$)(?:\$\$)*\$(?!\$)", word)]
        assert tuple(word.replace("$$", "$") for word in container["command"]) == server.argv
        assert pod["metadata"]["labels"] == deployment["spec"]["selector"]["matchLabels"]
        if server.num_gpus:
            assert container["resources"]["limits"] == {"nvidia.com/gpu": str(server.num_gpus)}
        # every host that a flag names is a Service that leads to this pod
        assert services[server.host]["spec"]["selector"] == pod["metadata"]["labels"]
        names = {volume["name"] for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == names


def test_reasons_stand_beside_the_flags(plan):
    for kind in TEMPLATES:
        text = render_template(kind, plan)
        for server in plan.servers:
            for one in server.flags:
                assert one.why in text


def test_amd_gpus_are_devices():
    text = render_template("compose", served("glm-5.2", gpu="mi355x"))
    assert "/dev/kfd" in yaml.safe_load(text)["services"]["server"]["devices"]
    assert "amd.com/gpu" in render_template("k8s", served("glm-5.2", gpu="mi355x"))


def test_a_host_that_is_an_address_gets_no_service():
    plan = served("kimi-k2.5", network=Network(hosts=("10.0.0.1",)))
    documents = list(yaml.safe_load_all(render_template("k8s", plan)))
    assert [one["kind"] for one in documents if one is not None] == ["Deployment"]


def test_an_unknown_template():
    with pytest.raises(UsageError, match="nomad"):
        check_template("nomad")
