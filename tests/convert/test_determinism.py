"""The same source, recipe and version give the same directory, byte for byte, however it is made."""

import pytest
import torch

from quantkit.checkpoint.source import open_checkpoint
from quantkit.convert.local import Share, execute
from quantkit.transcode import kernels
from quantkit.verify.verify import verify_output
from tests.convert.helpers import convert, directory_bytes
from tests.convert.plans import plan_of


@pytest.mark.parametrize("scales", ["search", "absmax"])
@pytest.mark.parametrize("form", ["fp8_block", "bf16"])
def test_workers_and_repetition_do_not_change_a_byte(form, scales, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(source_format=form)
    (source.directory / "chat_template.jinja").write_text("{{ x }}")
    outputs = []
    for run, num_jobs in enumerate((1, 2, 5, 1)):
        convert(source.directory, tmp_path / f"out{run}", num_jobs=num_jobs, scales=scales)
        outputs.append(directory_bytes(tmp_path / f"out{run}"))
    assert all(output == outputs[0] for output in outputs)
    assert len(outputs[0]) == 7  # two shards, index, config, card, manifest, template


@pytest.mark.parametrize("form", ["fp8_block", "fp8_channel", "bf16", "f16", "f32", "int4_native"])
def test_size_of_the_tasks_does_not_change_a_byte_or_a_statistic(form, tiny_checkpoint, tmp_path):
    model_type = "kimi_k2" if form == "int4_native" else "glm_moe_dsa"
    plan = plan_of(tiny_checkpoint(source_format=form, model_type=model_type).directory)
    results = []
    for task_bytes in (1 << 10, 3 << 10, 1 << 24):
        directory = tmp_path / str(task_bytes)
        directory.mkdir()
        execution = execute(plan, Share(directory=directory), num_jobs=2, task_bytes=task_bytes)
        results.append((directory_bytes(directory), execution.errors, execution.output_records))
    assert results[0] == results[1] == results[2]


def test_tensors_of_any_rank_are_cut_into_tasks(tiny_checkpoint, tmp_path):
    """A convolution in FP16, which becomes BF16 row by row."""
    source = tiny_checkpoint(source_format="f16")
    values = torch.randn(6, 3, 4, 8).half()
    source.put("model.visual.patch_embed.weight", values)
    source.write()
    plan, whole = plan_of(source.directory), values.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    for task_bytes in (16, 48, 1 << 20):
        directory = tmp_path / str(task_bytes)
        directory.mkdir()
        execute(plan, Share(directory=directory), num_jobs=2, task_bytes=task_bytes)
        assert any(whole in content for content in directory_bytes(directory).values()), task_bytes
    convert(source.directory, tmp_path / "out")
    report = verify_output(tmp_path / "out", source=open_checkpoint(source.directory))
    assert report.is_good, report.first_error()


@pytest.mark.parametrize("scales", ["search", "absmax"])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("form", ["fp8_block", "fp8_channel", "fp8_tensor", "bf16", "f16", "f32"])
def test_every_fused_kernel_gives_the_bytes_of_the_specification(
    form, signed, scales, tiny_checkpoint, tmp_path, monkeypatch
):
    source = tiny_checkpoint(source_format=form)
    keys = {(job.weight.codec.name, job.scheme.name) for job in plan_of(source.directory).jobs if job.scheme}
    assert keys
    assert keys <= set(kernels.FUSED_CPU)
    convert(source.directory, tmp_path / "fused", scales=scales, signed_scales=signed)
    monkeypatch.setattr(kernels, "FUSED_CPU", {})
    convert(source.directory, tmp_path / "composed", scales=scales, signed_scales=signed)
    assert directory_bytes(tmp_path / "fused") == directory_bytes(tmp_path / "composed")


def test_positive_scales_are_positive_and_signed_ones_are_not(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    for signed in (True, False):
        convert(source.directory, tmp_path / f"out{signed}", signed_scales=signed)
    signs = {}
    for signed in (True, False):
        checkpoint = open_checkpoint(tmp_path / f"out{signed}")
        name = "model.layers.1.mlp.experts.0.gate_proj.weight_scale"
        from quantkit.checkpoint.reader import read_tensor

        signs[signed] = bool((read_tensor(checkpoint.tensors[name]) & 0x8000).any())
    assert signs == {True: True, False: False}


def test_importing_the_conversion_path_imports_no_torch():
    import subprocess
    import sys

    code = (
        "import sys, quantkit.convert.convert, quantkit.verify.verify, quantkit.sources;"
        "import quantkit.numerics.fused_cpu;"
        "bad = {'torch', 'transformers', 'safetensors', 'rich'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
