"""Conversion by GPUs gives the bytes of the processor; without one, stages in Triton's interpreter stand in."""

import subprocess
import sys
import threading
from contextlib import nullcontext

import pytest
import torch

from quantkit.convert import worker
from quantkit.errors import ResourceError, UsageError, VerificationError
from quantkit.plan.resources import GPU_BASE_BYTES, choose_jobs, memory_bytes
from quantkit.transcode import choose_kernels
from quantkit_kernels import requantize, staging
from tests.convert.helpers import PROGRAM, convert, directory_bytes

pytestmark = pytest.mark.gpu
HAS_GPU = torch.cuda.is_available()


@pytest.fixture
def stages(monkeypatch):
    """Names of the devices of all stages that are made."""
    made = []
    one_at_a_time = nullcontext() if HAS_GPU else threading.Lock()  # the interpreter knows no threads

    class Watched(staging.Stage):
        def __init__(self, device):
            super().__init__(device)
            made.append(device)

        def quantize(self, *args, **options):
            with one_at_a_time:
                return super().quantize(*args, **options)

    monkeypatch.setattr(staging, "Stage", Watched)
    if not HAS_GPU:
        monkeypatch.setattr(staging, "find_devices", lambda _: ("cpu:0", "cpu"))
        for tile in ("SEARCH_TILE", "ABSMAX_TILE", "ERROR_GROUPS"):  # few large steps, not many small ones
            monkeypatch.setattr(requantize, tile, 1 << 15)
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
def test_the_same_directory(form, scales, signed, stages, tiny_checkpoint, tmp_path):
    model_type = "kimi_k2" if form == "int4_native" else "glm_moe_dsa"
    source = tiny_checkpoint(source_format=form, model_type=model_type)
    options = {"scales": scales, "signed_scales": signed}
    convert(source.directory, tmp_path / "golden", **options)
    convert(source.directory, tmp_path / "out", device="cuda:all", **options)
    assert directory_bytes(tmp_path / "out") == directory_bytes(tmp_path / "golden")
    assert bool(stages) == (form != "int4_native")  # what is INT4 already is copied


def test_threads_take_the_devices_in_turn(stages, tiny_checkpoint, tmp_path):
    names = staging.find_devices("cuda:all")
    convert(tiny_checkpoint().directory, tmp_path / "out", num_jobs=4, device="cuda:all")
    assert 1 <= len(stages) <= 4
    assert stages == [names[index % len(names)] for index in range(len(stages))]


def test_a_kernel_that_computes_wrong_is_found(stages, tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setitem(requantize.CANDIDATES, 32, (6.0,))
    with pytest.raises(VerificationError, match="the fast path and the specification differ") as caught:
        convert(tiny_checkpoint().directory, tmp_path / "out", device="cuda")
    assert "numba or Triton" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_full_gpu_is_named(stages, tiny_checkpoint, tmp_path, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(staging, "quantize", full)
    with pytest.raises(ResourceError, match="has no memory left"):
        convert(tiny_checkpoint().directory, tmp_path / "out", device="cuda")


def test_only_quantized_rows_go_to_the_gpu(stages, tiny_checkpoint, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("went to the GPU")

    monkeypatch.setattr(staging.Stage, "quantize", refuse)
    monkeypatch.setattr(worker, "_check_first_row", lambda *_: None)
    source = tiny_checkpoint(source_format="int4_native", model_type="kimi_k2")
    convert(source.directory, tmp_path / "out", device="cuda")


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
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UsageError, match=r"torch sees (no|0) GPU"):
        choose_kernels(device)


def test_devices_are_those_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert staging.find_devices("cuda:all") == ("cuda:0", "cuda:1", "cuda:2")
    assert staging.find_devices("cuda") == ("cuda:0",)
    assert staging.find_devices("cuda:2,cuda:0") == ("cuda:2", "cuda:0")
    with pytest.raises(ValueError, match="named twice"):
        staging.find_devices("cuda,cuda:0")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "quantkit_kernels.staging", None)
    with pytest.raises(UsageError, match="needs torch and Triton") as caught:
        choose_kernels("cuda")
    assert "quantkit[kernels]" in str(caught.value)


def test_a_gpu_costs_memory_of_the_machine():
    assert memory_bytes(1, device="cuda") - memory_bytes(1) == GPU_BASE_BYTES
    assert choose_jobs(1, memory_bytes(1, device="cuda"), device="cuda") == 1
    with pytest.raises(ResourceError):
        choose_jobs(1, memory_bytes(1), device="cuda")


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--device", "cuda:4711"], "cuda:4711 is not here"), (["--device", "cuda", "--finalize"], "computes nothing")],
)
def test_the_command_refuses_before_it_plans(options, words, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    command = [sys.executable, "-c", PROGRAM, "convert", str(source.directory), "-o", str(tmp_path / "out"), *options]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 2, ran.stderr
    assert words in ran.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
