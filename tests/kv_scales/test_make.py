"""Scales and errors against the numbers that statistics were made from; what cannot be meant is refused by name."""

import numpy as np
import pytest
import torch

from quantkit.cli.kv_scales_request import requests_of
from quantkit.errors import SourceError, UsageError
from quantkit.numerics.magnitudes import bins_of
from tests.kv_scales.helpers import calibrated, report_of


def stored(values, scale):
    """Relative error and clipped share by torch's own cast, clamped as engines clamp."""
    scaled = torch.from_numpy(values).double() / scale
    read = scaled.float().clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale
    error = (read - torch.from_numpy(values).double()).square().sum() / torch.from_numpy(values).double().square().sum()
    return float(error.sqrt()), float((scaled.abs() > 448).double().mean())


@pytest.mark.parametrize("model_type", ["glm4_moe", "qwen3_moe"])
@pytest.mark.parametrize("method", ["absmax", "percentile", "mse"])
@pytest.mark.parametrize("scope", ["tensor", "head"])
def test_errors_of_heads_are_those_of_the_numbers(model_type, method, scope, tiny_checkpoint, tmp_path):
    """Within 3 %: the histogram tells 2 % (see its tests), from fewer numbers here."""
    source = tiny_checkpoint(model_type=model_type).directory
    numbers = calibrated(source, tmp_path / "s.safetensors", sigmas={"k": 250.0})
    report = report_of(source, statistics=tmp_path / "s.safetensors", method=method, scope=scope, percentile=99.9)
    assert [one.scales.layer for one in report.layers] == [0, 1]
    for layer in report.layers:
        for part in layer.parts:
            values = numbers[f"{layer.scales.module}.{part.part}"]
            scales = layer.scales.k if part.part == "k" else layer.scales.v
            assert scales.shape == ((2,) if scope == "head" else (1,))
            scale_RC = np.broadcast_to(scales.astype(np.float64), 2)[None, :, None]
            for found, scale in ((part.at_unit, 1.0), (part.at_scale, torch.from_numpy(scale_RC.copy()))):
                relative, clipped = stored(values, scale)
                assert found.relative == pytest.approx(relative, rel=0.05 if clipped else 0.03)
                assert found.clipped_fraction == pytest.approx(clipped, rel=0.1, abs=1e-4)
            largest = np.abs(values).max(axis=(0, 2) if scope == "head" else None)
            expected = np.atleast_1d(largest).astype(np.float64) / 448
            if method == "absmax":
                assert (scales >= expected).all()
                assert scales == pytest.approx(expected, rel=1e-6)
                assert part.at_scale.num_clipped == 0
            elif method == "percentile":
                assert (scales <= expected * 1.000001).all()
                assert part.at_scale.clipped_fraction <= 0.001
            else:
                assert part.at_scale.relative <= min(
                    part.at_unit.relative, stored(values, float(expected.max()))[0] * 1.03
                )


def test_the_clipped_share_at_scale_one_is_seen(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type="glm4_moe").directory
    calibrated(source, tmp_path / "s.safetensors", sigmas={"k": 250.0})
    report = report_of(source, statistics=tmp_path / "s.safetensors")
    key = report.layers[1].parts[0]
    assert (key.part, key.at_unit.clipped_fraction > 0.3, key.at_unit.relative > 0.2) == ("k", True, True)
    assert key.at_scale.relative < 0.03


@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_k2", "kimi_k25", "glm_moe_dsa", "glm4_moe_lite"])
@pytest.mark.parametrize("method", ["absmax", "percentile", "mse"])
def test_one_scale_serves_latent_and_rope(model_type, method, tiny_checkpoint, tmp_path):
    """A scale of the latent alone, 0.03 beside 1, would clip the rope part to nothing."""
    source = tiny_checkpoint(model_type=model_type).directory
    numbers = calibrated(source, tmp_path / "s.safetensors")
    report = report_of(source, statistics=tmp_path / "s.safetensors", method=method, percentile=100)
    for layer in report.layers:
        latent, rope = layer.parts
        assert (latent.part, rope.part) == ("latent", "rope")
        assert layer.scales.k == layer.scales.v
        values = numbers[f"{layer.scales.module}.rope"]
        if method != "mse":
            assert layer.scales.k[0] == pytest.approx(np.abs(values).max() / 448, rel=1e-6)
        assert rope.at_scale.relative < 0.03
        alone = float(np.abs(numbers[f"{layer.scales.module}.latent"]).max() / 448)
        assert stored(values, alone)[0] > 0.8


def test_the_same_statistics_give_the_same_scales(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type="glm4_moe").directory
    calibrated(source, tmp_path / "s.safetensors")
    first, second = (report_of(source, statistics=tmp_path / "s.safetensors", method="mse") for _ in range(2))
    for one, other in zip(first.layers, second.layers, strict=True):
        assert one.scales.k.tobytes() + one.scales.v.tobytes() == other.scales.k.tobytes() + other.scales.v.tobytes()


def test_mse_takes_one_where_nothing_is_better(tiny_checkpoint, tmp_path):
    """Numbers so small beside the largest that every scale loses all of them."""
    source = tiny_checkpoint(model_type="glm4_moe").directory

    def all_tiny(arrays):
        for name, array in arrays.items():
            array[:] = 0 if name.endswith("histogram") else 2.0
            if name.endswith("histogram"):
                array[:, 5] = 3  # magnitudes of about 2**-31
                array[:, bins_of(np.array([2.0], np.float32))] = 1

    calibrated(source, tmp_path / "s.safetensors", change=all_tiny)
    report = report_of(source, statistics=tmp_path / "s.safetensors", method="mse")
    assert report.is_unit


def test_zeros_say_nothing_of_a_percentile(tiny_checkpoint, tmp_path):
    """A head that is nearly always off would have a scale of next to nothing, and clip whenever it is on."""
    source = tiny_checkpoint(model_type="glm4_moe").directory
    calibrated(source, tmp_path / "plain.safetensors")

    def mostly_off(arrays):
        for name, array in arrays.items():
            if name.endswith("histogram"):
                array[:, 0] += 1 << 40

    calibrated(source, tmp_path / "s.safetensors", change=mostly_off)
    expected, got = (
        report_of(source, statistics=tmp_path / name, method="percentile", percentile=99.0)
        for name in ("plain.safetensors", "s.safetensors")
    )
    for one, other in zip(expected.layers, got.layers, strict=True):
        assert one.scales.k.tolist() == other.scales.k.tolist()


def test_a_percentile_without_its_method_is_refused():
    options = {"statistics": None, "per": "tensor", "spelling": None, "write_to": "sidecar"}
    with pytest.raises(UsageError, match="--percentile is of --method percentile"):
        requests_of(method="absmax", percentile=99.0, **options)
    with pytest.raises(UsageError, match="--percentile is of --method percentile"):
        requests_of(method=None, percentile=99.0, **options)
    request, _ = requests_of(method="percentile", percentile=None, **options)
    assert request.percentile == 99.99


def hardly_anything(arrays):
    """Values below every bin."""
    arrays[V1 + "absmax"][:] = 1e-38
    counts = arrays[V1 + "histogram"]
    counts[:] = 0
    counts[:, 0] = 5


V1 = "model.layers.1.self_attn.v_"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda a: [a.pop(V1 + leaf) for leaf in ("histogram", "absmax")],
            "layers.1.self_attn.v_histogram: is missing, ",
        ),
        (lambda a: [a.pop(name) for name in list(a) if ".1." in name], "layer was not visited"),
        (lambda a: a.pop(V1 + "absmax"), "layers.1.self_attn.v_histogram: is missing, and .*k_histogram is there"),
        (lambda a: a[V1 + "histogram"].__setitem__(0, 0), "layers.1.self_attn.v_histogram: row 0 saw no value"),
        (lambda a: a[V1 + "absmax"].__setitem__(1, 0), "row 1 saw no value other than 0"),
        (lambda a: a[V1 + "absmax"].__setitem__(1, -1.0), "layers.1.self_attn.v_absmax: holds a NaN"),
        (lambda a: a[V1 + "absmax"].__setitem__(1, np.nan), "holds a NaN"),
        (lambda a: a.update({V1 + "absmax": a[V1 + "absmax"][:1]}), r"has shape \[1\], and this model has \[2\]"),
        (lambda a: a.update({V1 + "histogram": a[V1 + "histogram"][:, :9]}), r"has shape \[2, 9\]"),
        (lambda a: a.update({V1 + "histogram": a[V1 + "histogram"].astype(np.float32)}), "holds no counts"),
        (hardly_anything, r"s\.safetensors: model\.layers\.1\.self_attn: a largest value of .* gives no scale"),
        (lambda a: a[V1 + "absmax"].__setitem__(1, 3e38), "row 1: its largest value is not in the highest bin"),
        (lambda a: a[V1 + "histogram"].__setitem__((0, 9), 1 << 61), "holds no counts"),
        (lambda a: a.update({V1 + "absmax": a[V1 + "absmax"].astype(np.int64)}), "holds no magnitudes"),
    ],
)
def test_statistics_that_give_no_scale_are_refused_by_layer(change, words, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type="glm4_moe").directory
    calibrated(source, tmp_path / "s.safetensors", change=change)
    with pytest.raises(SourceError, match=words):
        report_of(source, statistics=tmp_path / "s.safetensors")


def test_statistics_of_another_model_are_refused(tiny_checkpoint, tmp_path):
    one, other = (tiny_checkpoint(name, model_type="glm4_moe", seed=seed) for seed, name in enumerate(("a", "b")))
    calibrated(one.directory, tmp_path / "s.safetensors")
    with pytest.raises(SourceError, match="another model or revision"):
        report_of(other.directory, statistics=tmp_path / "s.safetensors")


@pytest.mark.parametrize(
    ("model_type", "request_", "words"),
    [
        ("glm4_moe", {"method": "absmax"}, "needs statistics"),
        ("deepseek_v3", {"method": "unit", "scope": "head"}, "one row for all heads"),
        ("glm4_moe", {"method": "unit", "scope": "head", "spelling": "modelopt"}, "has one number"),
    ],
)
def test_options_that_do_not_go_together(model_type, request_, words, tiny_checkpoint):
    source = tiny_checkpoint(model_type=model_type).directory
    with pytest.raises(UsageError, match=words):
        report_of(source, **request_)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_stored_scale_that_is_none_is_refused(bad, tiny_checkpoint):
    source = tiny_checkpoint(model_type="glm4_moe", write=False)
    for leaf, value in (("k_scale", 0.5), ("v_scale", bad)):
        source.put(f"model.layers.1.self_attn.attn.{leaf}", torch.tensor([value]))
    source.write()
    with pytest.raises(SourceError, match=r"layers\.1\.self_attn\.attn\.v_scale: is .*, and a scale is above 0"):
        report_of(source.directory)


@pytest.mark.parametrize(("odd", "words"), [(1e-45, r"is 1\.4013e-45"), (1e-39, "is 1e-39"), (3e38, r"is 3e\+38")])
def test_a_stored_scale_that_a_gpu_takes_for_none_is_refused(odd, words, tiny_checkpoint):
    """Subnormal, or of a subnormal inverse."""
    source = tiny_checkpoint(model_type="glm4_moe", write=False)
    for leaf, value in (("k_scale", odd), ("v_scale", 0.5)):
        source.put(f"model.layers.1.self_attn.{leaf}", torch.tensor([value]))
    source.write()
    with pytest.raises(SourceError, match=rf"layers\.1\.self_attn\.k_scale: {words}: .*a normal float32"):
        report_of(source.directory)


@pytest.mark.parametrize("names", [("k_scale", "attn.k_scale"), ("attn_mqa.k_scale", "k_proj.k_scale")])
def test_two_names_of_one_stored_scale_agree(names, tiny_checkpoint):
    source = tiny_checkpoint(model_type="glm4_moe", write=False)
    for name, values in zip(names, (torch.tensor(0.5), torch.tensor([0.5, 0.5])), strict=True):
        source.put(f"model.layers.1.self_attn.{name}", values)
        source.put(f"model.layers.1.self_attn.{name.replace('k_', 'v_')}", torch.tensor(0.25))
    source.write()
    assert len(report_of(source.directory).stored) == 4
    source.put(f"model.layers.1.self_attn.{names[1]}", torch.tensor([0.5, 0.75]))
    source.write()
    with pytest.raises(SourceError, match="another name of the same scale") as caught:
        report_of(source.directory)
    assert all(told in str(caught.value) for told in (*names, "0.5 to 0.75"))


@pytest.mark.parametrize("names", [("k_proj.k_scale", "v_proj.v_scale"), ("attn.k_scale", "attn.v_scale")])
def test_stored_scales_come_in_pairs(names, tiny_checkpoint):
    source = tiny_checkpoint(model_type="glm4_moe", write=False)
    for leaf in names:
        source.put(f"model.layers.1.self_attn.{leaf}", torch.tensor(0.5, dtype=torch.bfloat16))
    source.write()
    assert [(one.least, one.largest) for one in report_of(source.directory).stored] == [(0.5, 0.5)] * 2
    source.remove(f"model.layers.1.self_attn.{names[1]}")
    source.write()
    with pytest.raises(SourceError, match=f"{names[0]}: has no .*{names[1]} beside it"):
        report_of(source.directory)
