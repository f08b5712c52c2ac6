"""A Ray cluster of two nodes on one machine makes the same bytes, also when one of them is lost in the middle."""

import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import ray
from ray.cluster_utils import Cluster

from quantkit.checkpoint.output import WORK_NAME
from quantkit.convert import ray_executor
from quantkit.convert.conversion import Conversion
from quantkit.convert.convert import convert_checkpoint
from quantkit.convert.ray_executor import RayExecutor
from quantkit.errors import ResourceError, SourceError, UsageError
from quantkit.importance.open import open_importance
from quantkit.plan.importance import with_importance
from tests.checkpoint.hub_server import REPOSITORY, serve
from tests.convert.helpers import PROGRAM, convert, directory_bytes
from tests.convert.plans import plan_of
from tests.importance.files import expert_entries, write_gguf

NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


def free_port():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]


PORT = free_port()
HUB = {"HF_ENDPOINT": f"http://127.0.0.1:{PORT}", "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two nodes; tests may add others and remove them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        for name, value in HUB.items():  # nodes ask the hub themselves, by an environment of their own
            patch.setenv(name, value)
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("home")))
        made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        made.add_node(**NODE)
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def source(tiny_checkpoint):
    made = tiny_checkpoint(num_shards=6)
    (made.directory / "chat_template.jinja").write_text("{{ x }}")
    return made


def by_ray(source, target, cluster):
    conversion = Conversion(plan=plan_of(source.directory), target=target, num_jobs=1)
    return convert_checkpoint(conversion, RayExecutor(address=cluster.address))


def test_a_cluster_makes_the_same_bytes(source, cluster, tmp_path):
    convert(source.directory, tmp_path / "golden")
    report = by_ray(source, tmp_path / "out", cluster)
    assert directory_bytes(tmp_path / "out") == directory_bytes(tmp_path / "golden")
    assert report.encoded_bytes > 0
    assert {path.name for path in tmp_path.iterdir()} == {"source", "golden", "out"}


def test_nodes_read_the_importance_file_that_the_plan_was_made_with(source, cluster, tmp_path):
    path = write_gguf(tmp_path / "imatrix.gguf", expert_entries())
    convert(source.directory, tmp_path / "golden", importance=path)
    plan = with_importance(plan_of(source.directory), open_importance(path))
    conversion = Conversion(plan=plan, target=tmp_path / "out", num_jobs=1)
    executor = RayExecutor(address=cluster.address)
    write_gguf(path, expert_entries(seed=4))
    with pytest.raises(SourceError, match="is another file than the plan was made with"):
        convert_checkpoint(conversion, executor)
    write_gguf(path, expert_entries())
    convert_checkpoint(conversion, executor)
    assert directory_bytes(tmp_path / "out") == directory_bytes(tmp_path / "golden")


def test_a_node_that_is_lost_in_the_middle_costs_only_its_shards(source, cluster, tmp_path, monkeypatch):
    convert(source.directory, tmp_path / "golden")
    collect, again = ray_executor._Run._collect, []
    monkeypatch.setattr(ray_executor._Run, "_collect", lambda run: again.extend(lost := collect(run)) or lost)
    for attempt in range(5):  # a node may be done before it is lost
        target = tmp_path / f"out{attempt}"
        attempts = tmp_path / f"out{attempt}.partial" / WORK_NAME / "ray"
        thread = threading.Thread(target=lose, args=(cluster, cluster.add_node(**NODE), attempts))
        thread.start()
        by_ray(source, target, cluster)
        thread.join()
        assert directory_bytes(target) == directory_bytes(tmp_path / "golden")
        if again:
            break
    assert again


def lose(cluster, node, attempts):
    """Remove a node, as a power cut would, when the work has begun."""
    while not attempts.is_dir() or not any(attempts.iterdir()):
        time.sleep(0.005)
    cluster.remove_node(node, allow_graceful=False)


def test_a_bad_source_is_the_same_error_and_finished_work_is_kept(tiny_checkpoint, cluster, tmp_path):
    source = tiny_checkpoint(num_shards=16)  # more than two for each node, those just lost among them
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    # in a shard of their own: the smallest is begun last, when others are finished
    moved = {key: source.remove(key) for key in (name, name + "_scale_inv")}
    moved[name + "_scale_inv"].fill_(float("nan"))
    source.shards["smallest.safetensors"] = moved
    source.write()
    with pytest.raises(SourceError) as caught:
        by_ray(source, tmp_path / "out", cluster)
    assert caught.value.tensor == name
    assert any("the same command goes on" in note for note in caught.value.__notes__)
    assert (tmp_path / "out.partial" / WORK_NAME).is_dir()
    assert not (tmp_path / "out.partial" / WORK_NAME / "ray").exists()


def test_only_nodes_with_gpus_work_where_gpus_are_asked_for(source, cluster, tmp_path):
    """Ray takes our word for two GPUs of a node; torch, on that node alone, says that there is none."""
    conversion = Conversion(plan=plan_of(source.directory), target=tmp_path / "out", num_jobs=1, device="cuda:all")
    with pytest.raises(ResourceError, match="no node of the Ray cluster has what --device cuda:all asks for"):
        convert_checkpoint(conversion, RayExecutor(address=cluster.address))
    node = cluster.add_node(**NODE, num_gpus=2)
    try:
        with pytest.raises(UsageError, match="torch sees no GPUs"):
            convert_checkpoint(conversion, RayExecutor(address=cluster.address))
    finally:
        cluster.remove_node(node)


@pytest.mark.parametrize(
    ("device", "num_there", "asked"),
    [
        ("cpu", 0, 0),
        ("cpu", 8, 0),
        ("cuda", 8, 1),
        ("cuda:0,cuda:3", 8, 2),
        ("cuda:0,cuda:1", 1, None),
        ("cuda:all", 8, 8),
        ("cuda:all", 0, None),
    ],
)
def test_an_actor_asks_for_the_gpus_that_it_uses(device, num_there, asked):
    assert ray_executor.gpus_asked_for(device, num_there) == asked


def test_a_cluster_whose_cores_are_taken_is_named(source, cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_executor, "_BEGIN_SECONDS", 2)

    @ray.remote
    class Holder:
        def answer(self):
            return True

    if not ray.is_initialized():
        ray.init(address=cluster.address, log_to_driver=False)
    holders = []
    while True:  # a node that was removed counts for a while yet, and nobody would ever begin there
        holder = Holder.options(num_cpus=1).remote()
        begun, _ = ray.wait([holder.answer.remote()], timeout=8 if holders else 60)
        if not begun:
            ray.kill(holder)
            break
        holders.append(holder)
    assert holders
    try:
        with pytest.raises(ResourceError, match="no node of the Ray cluster has begun"):
            by_ray(source, tmp_path / "out", cluster)
    finally:
        for holder in holders:
            ray.kill(holder)


def test_nodes_stream_from_the_hub(source, cluster, tmp_path):
    command = [sys.executable, "-c", PROGRAM, "convert", REPOSITORY, "-q"]
    by_nodes = ["-o", str(tmp_path / "out"), "--executor", "ray", "--ray-address", cluster.address]
    env = {**os.environ, **HUB, "HF_HOME": str(tmp_path / "home")}
    with serve(source.directory, PORT) as (handler, _):
        handler.lists_hashes = True
        for number, options in enumerate((by_nodes, ["-o", str(tmp_path / "golden")]), 1):
            ran = subprocess.run([*command, *options], capture_output=True, text=True, check=False, env=env)
            assert ran.returncode == 0, ran.stderr
            # only whoever completes the output needs the files beside the weights
            assert handler.served["chat_template.jinja"] == number * len("{{ x }}")
    assert directory_bytes(tmp_path / "out") == directory_bytes(tmp_path / "golden")
    assert not list((tmp_path / "home").rglob("*.safetensors"))


def test_the_command(source, cluster, tmp_path):
    convert(source.directory, tmp_path / "golden")
    command = [sys.executable, "-c", PROGRAM, "convert", "source", "-o", "out", "-q", "--executor", "ray"]
    ran = subprocess.run(
        [*command, "--ray-address", cluster.address], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    assert directory_bytes(tmp_path / "out") == directory_bytes(tmp_path / "golden")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--executor", "dask"), "--executor dask is not known; choose local, ray"),
        (("--ray-address", "auto"), "--ray-address is an option of --executor ray"),
        (("--executor", "ray", "--finalize"), "Ray shares the work itself"),
        (("--executor", "ray", "--ray-address", "127.0.0.1:9"), "no Ray cluster answers at '127.0.0.1:9'"),
    ],
)
def test_options_that_do_not_go_together(options, words, source, tmp_path):
    command = [sys.executable, "-c", PROGRAM, "convert", str(source.directory), "-o", str(tmp_path / "out"), *options]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 2, ran.stderr
    assert words in ran.stderr
