"""Conversion by GPUs gives the bytes of the processor; without one, lanes in Triton's interpreter stand in."""

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from quantkit.convert.journal import Journal
from quantkit.errors import ResourceError, UsageError, VerificationError
from quantkit.plan.resources import GPU_BASE_BYTES, choose_jobs, memory_bytes
from quantkit.transcode import FUSED_CPU, ON_GPU, choose_kernels, first_device
from quantkit.transcode.devices import GpuKernels, Gpus
from quantkit_kernels import requantize, staging
from tests.convert.helpers import PROGRAM, convert, directory_bytes
from tests.importance.files import expert_entries, write_gguf

pytestmark = pytest.mark.gpu
HAS_GPU = torch.cuda.is_available()


@pytest.fixture
def lanes(monkeypatch):
    """Names of the devices of all lanes that are made; two where there is no GPU."""
    made = []
    one_at_a_time = nullcontext() if HAS_GPU else threading.Lock()  # the interpreter knows no threads

    class Watched(staging.Lane):
        def __init__(self, device):
            super().__init__(device if HAS_GPU else "cpu")
            made.append(device)

        def quantize(self, *args, **options):
            with one_at_a_time:
                return super().quantize(*args, **options)

    monkeypatch.setattr(staging, "Lane", Watched)
    if not HAS_GPU:
        monkeypatch.setattr(staging, "count_gpus", lambda: 2)
        for tile in ("WEIGHTS_PER_PROGRAM", "ERROR_GROUPS"):  # few large steps, not many small ones
            monkeypatch.setattr(requantize, tile, 1 << 15)
        monkeypatch.setattr(requantize, "ABSMAX_WEIGHTS", 256)  # of one row, and these rows have no more
    return made


@pytest.mark.parametrize(
    ("form", "scales", "signed"),
    [
        ("fp8_block", "search", True),
        ("fp8_block", "absmax", False),
        ("fp8_channel", "search", False),
        ("bf16", "search", True),
        ("f16", "absmax", True),
        ("int4_native", "search", True),
    ],
)
def test_the_same_directory(form, scales, signed, lanes, tiny_checkpoint, tmp_path):
    model_type = "kimi_k2" if form == "int4_native" else "glm_moe_dsa"
    fewer = {} if HAS_GPU else {"n_routed_experts": 1}  # the interpreter takes milliseconds a row
    source = tiny_checkpoint(source_format=form, model_type=model_type, config_changes=fewer)
    options = {"scales": scales, "signed_scales": signed}
    convert(source.directory, tmp_path / "golden", **options)
    convert(source.directory, tmp_path / "out", device="cuda:all", **options)
    assert directory_bytes(tmp_path / "out") == directory_bytes(tmp_path / "golden")
    assert bool(lanes) == (form != "int4_native")  # what is INT4 already is copied


@pytest.mark.parametrize("form", ["fp8_block", "bf16"])
def test_importance_reaches_the_kernels(form, lanes, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(source_format=form).directory
    path = write_gguf(tmp_path / "imatrix.gguf", expert_entries())
    convert(source, tmp_path / "golden", importance=path)
    convert(source, tmp_path / "out", device="cuda:all", importance=path)
    assert directory_bytes(tmp_path / "out") == directory_bytes(tmp_path / "golden")
    assert lanes


def test_every_way_into_a_gpu_has_been_run():
    assert set(ON_GPU) == {key for key in FUSED_CPU if key[1] == "int4_group"}
    assert {key[0] for key in ON_GPU} == {"fp8_block", "float_values"}


def test_sums_outlive_the_next_call_of_a_lane(lanes):
    """They are booked by another thread, when the lane may be at work again."""
    lane = staging.Lane("cuda:0")
    options = {"group_size": 32, "scales": "absmax", "signed": False}
    first = lane.quantize(staging.HostSource(np.full((4, 32), 3.1, np.float32)), **options)
    kept = first.weight2.copy()
    second = lane.quantize(staging.HostSource(np.full((4, 32), 5.7, np.float32)), **options)
    assert (first.weight2 == kept).all()
    assert (second.weight2 != kept).all()


def test_threads_take_the_gpus_in_turns_and_keep_theirs():
    gpus = Gpus(("a", "b", "c"), lambda name: [name])
    barrier = threading.Barrier(6)

    def lanes_of(_):
        barrier.wait(timeout=30)
        return gpus.lane(), gpus.lane()

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lanes_of, range(6)))
    assert all(first is second for first, second in found)
    assert sorted(lane[0] for lane, _ in found) == ["a", "a", "b", "b", "c", "c"]


def test_a_run_goes_on_with_another_device(lanes, tiny_checkpoint, tmp_path, monkeypatch):
    """Interrupted behind its first shard on the processor, made ready on GPUs: the bytes of one run."""
    source = tiny_checkpoint(num_shards=3)
    convert(source.directory, tmp_path / "golden")
    add_output = Journal.add_output

    def interrupt(journal, name, entry):
        add_output(journal, name, entry)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add_output", interrupt)
        with pytest.raises(KeyboardInterrupt):
            convert(source.directory, tmp_path / "out", num_jobs=1)
    assert (tmp_path / "out.partial").is_dir()
    convert(source.directory, tmp_path / "out", device="cuda:all")
    assert directory_bytes(tmp_path / "out") == directory_bytes(tmp_path / "golden")


def test_a_kernel_that_computes_wrong_is_found(lanes, tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setitem(requantize.CANDIDATES, 32, (6.0,))
    with pytest.raises(VerificationError, match="the fast path and the specification differ") as caught:
        convert(tiny_checkpoint().directory, tmp_path / "out", device="cuda")
    assert "numba or Triton" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_full_gpu_is_named(lanes, tiny_checkpoint, tmp_path, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(staging, "quantize", full)
    with pytest.raises(ResourceError, match="has no memory left"):
        convert(tiny_checkpoint().directory, tmp_path / "out", device="cuda")


def test_only_quantized_rows_go_to_the_gpu(lanes, tiny_checkpoint, tmp_path, monkeypatch):
    went, quantize = [], GpuKernels.quantize

    def watched(kernels, rows, scheme):
        went.append(rows.weight.name)
        return quantize(kernels, rows, scheme)

    monkeypatch.setattr(GpuKernels, "quantize", watched)
    convert(tiny_checkpoint().directory, tmp_path / "out", device="cuda")
    assert len(set(went)) == 12
    assert all(".mlp.experts." in name for name in went)


def test_what_no_gpu_has_a_kernel_for_is_done_by_the_processor(lanes, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    options = {"zero_points": True, "engine": "vllm"}
    convert(source, tmp_path / "golden", **options)
    convert(source, tmp_path / "out", device="cuda", **options)
    assert directory_bytes(tmp_path / "out") == directory_bytes(tmp_path / "golden")


@pytest.mark.parametrize("layout", ["w4afp8", "compressed-tensors"])
def test_layouts_of_gpus_are_those_of_the_processor(layout, lanes, tiny_checkpoint, tmp_path):
    fewer = {} if HAS_GPU else {"n_routed_experts": 1}
    source = tiny_checkpoint(config_changes=fewer).directory
    options = {"layout": layout, "group_size": 128, "signed_scales": False}
    convert(source, tmp_path / "golden", **options)
    convert(source, tmp_path / "out", device="cuda", **options)
    assert directory_bytes(tmp_path / "out") == directory_bytes(tmp_path / "golden")
    assert lanes


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("gpu", "'gpu' is no GPU"),
        ("cuda:x", "'cuda:x' is no GPU"),
        (",cuda:0", "'' is no GPU"),
        ("cpu,cuda:0", "'cpu' is no GPU"),
        ("cuda:4711", "cuda:4711 is not here"),
        ("", "'' is no GPU"),
    ],
)
def test_a_device_that_is_not_here_is_named(device, words):
    with pytest.raises(UsageError, match="--device") as caught:
        choose_kernels(device)
    assert words in str(caught.value)


@pytest.mark.parametrize("device", ["cuda:all", "cuda"])
def test_no_gpu_is_said_so(device, monkeypatch):
    monkeypatch.setattr(staging, "count_gpus", lambda: 0)
    with pytest.raises(UsageError, match="torch sees no GPUs"):
        choose_kernels(device)


def test_a_model_runs_on_the_first_device():
    names = {"cpu": "cpu", "cuda": "cuda:0", "cuda:all": "cuda:0", "cuda:3": "cuda:3", "cuda:2,cuda:1": "cuda:2"}
    assert {name: first_device(name) for name in names} == names


def test_devices_are_those_named(monkeypatch):
    monkeypatch.setattr(staging, "count_gpus", lambda: 3)
    assert choose_kernels("cuda:all").__self__.names == ("cuda:0", "cuda:1", "cuda:2")
    assert choose_kernels("cuda").__self__.names == ("cuda:0",)
    assert choose_kernels("cuda:2,cuda:0").__self__.names == ("cuda:2", "cuda:0")
    with pytest.raises(UsageError, match="named twice"):
        choose_kernels("cuda,cuda:0")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "quantkit_kernels.staging", None)
    with pytest.raises(UsageError, match="needs torch and Triton") as caught:
        choose_kernels("cuda")
    assert "pip install '.[kernels]'" in str(caught.value)


def test_a_dry_run_counts_what_a_gpu_costs(tiny_checkpoint, capsys):
    source = str(tiny_checkpoint().directory)
    needs = []
    for device in ("cpu", "cuda"):
        run_main("convert", source, "--dry-run", "--jobs", "2", "--device", device, "--json")
        needs.append(json.loads(capsys.readouterr().out)["needs"]["memory_bytes"])
    assert needs[1] - needs[0] == GPU_BASE_BYTES


def run_main(*arguments):
    from typer.testing import CliRunner

    from quantkit.cli.app import app

    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    sys.stdout.write(result.stdout)


def test_a_gpu_costs_memory_of_the_machine():
    assert memory_bytes(1, device="cuda") - memory_bytes(1) == GPU_BASE_BYTES
    assert choose_jobs(1, memory_bytes(1, device="cuda"), device="cuda") == 1
    with pytest.raises(ResourceError):
        choose_jobs(1, memory_bytes(1), device="cuda")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "cuda:4711"], "cuda:4711 is not here"),
        (["--device", "cuda", "--finalize"], "computes nothing"),
        (["--device", "gpu", "--dry-run"], "'gpu' is no GPU"),
    ],
)
def test_the_command_refuses_before_it_plans(options, words, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    command = [sys.executable, "-c", PROGRAM, "convert", str(source.directory), "-o", str(tmp_path / "out"), *options]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 2, ran.stderr
    assert words in ran.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
