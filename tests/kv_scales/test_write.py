"""What is written, and that it appears whole or not at all."""

import json
import os
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from quantkit.checkpoint.source import open_checkpoint
from quantkit.convert.card import read_card
from quantkit.engines.launch import Launch
from quantkit.errors import QuantkitError, UsageError, VerificationError
from quantkit.kv_scales import into_checkpoint
from quantkit.kv_scales.make import KvScaleRequest
from quantkit.kv_scales.run import WriteRequest, run_kv_scales
from quantkit.verify.verify import verify_output
from tests.convert.faults import Faults, die_before, die_in_the_middle, fail_with, killed, some_kills
from tests.convert.helpers import convert, directory_bytes, load_output
from tests.kv_scales.helpers import calibrated, report_of

STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


@pytest.fixture
def converted(tiny_checkpoint, tmp_path):
    """An INT4 output with grouped-query attention, its statistics, and its source."""
    source = tiny_checkpoint(model_type="glm4_moe")
    (source.directory / "generation_config.json").write_text("{}")
    convert(source.directory, tmp_path / "int4")
    calibrated(tmp_path / "int4", tmp_path / "s.safetensors", sigmas={"k": 250.0})
    return tmp_path / "int4", tmp_path / "s.safetensors", source


def run(source, statistics=None, *, write=None, **request):
    return run_kv_scales(str(source), KvScaleRequest(statistics=statistics, **request), WriteRequest(**(write or {})))


def into(output, statistics, target):
    return run(output, statistics, write={"into_checkpoint": True, "output": target})


@pytest.mark.parametrize(
    ("request_", "leaves", "shape", "section"),
    [
        ({}, ("k_scale", "v_scale"), (1,), {"kv_cache_scheme": STATIC}),
        (
            {"scope": "head"},
            ("k_scale", "v_scale"),
            (2, 1, 1),
            {"kv_cache_scheme": STATIC | {"strategy": "attn_head"}},
        ),
        (
            {"spelling": "modelopt"},
            ("k_proj.k_scale", "v_proj.v_scale"),
            (),
            {"kv_cache_scheme": STATIC},  # the checkpoint is of compressed-tensors, whose readers want all of it
        ),
    ],
)
def test_a_sidecar_holds_tensors_and_what_the_config_must_say(request_, leaves, shape, section, converted, tmp_path):
    output, statistics, _ = converted
    path = tmp_path / "scales.safetensors"
    before = directory_bytes(output)
    result = run(output, statistics, write={"output": path}, **request_)
    assert result.written == path
    tensors = load_file(path)
    layers = {one.scales.layer: one.scales for one in result.report.layers}
    assert set(tensors) == {f"model.layers.{layer}.self_attn.{leaf}" for layer in (0, 1) for leaf in leaves}
    for layer, leaf in ((layer, leaf) for layer in (0, 1) for leaf in leaves):
        found = tensors[f"model.layers.{layer}.self_attn.{leaf}"]
        assert (found.shape, found.dtype) == (shape, np.float32)
        expected = layers[layer].k if leaf.endswith("k_scale") else layers[layer].v
        assert np.array_equal(found.ravel(), expected)
    with safe_open(path, "np") as stream:
        about = json.loads(stream.metadata()["quantkit_kv_scales"])
    assert about["quantization_config"] == section
    assert directory_bytes(output) == before


@pytest.mark.parametrize(
    ("model_type", "prefix"),
    [("deepseek_v3", "model."), ("glm_moe_dsa", "model."), ("kimi_k25", "language_model.model.")],
)
def test_latent_scales_are_written_when_forced_and_under_the_name_of_their_module(
    model_type, prefix, tiny_checkpoint, tmp_path
):
    source = tiny_checkpoint(model_type=model_type).directory
    calibrated(source, tmp_path / "s.safetensors")
    path = tmp_path / "scales.safetensors"
    result = run(source, tmp_path / "s.safetensors", write={"output": path})
    assert (result.written, path.exists()) == (None, False)
    assert "no backend that an engine takes by itself uses them" in result.why_not
    assert run(source, tmp_path / "s.safetensors", write={"output": path, "force": True}).written == path
    tensors = load_file(path)
    names = [f"{prefix}layers.{layer}.self_attn.attn_mqa.{leaf}_scale" for layer in (0, 1) for leaf in "kv"]
    assert sorted(tensors) == names
    assert tensors[names[0]] == tensors[names[1]]


def test_the_file_of_sglang_has_every_rank_and_layer_and_one_number_for_both(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type="glm4_moe").directory
    calibrated(source, tmp_path / "s.safetensors", sigmas={"v": 9.0})
    path = tmp_path / "scales.json"
    write = {"output": path, "tp": 4, "force": True}
    result = run(source, tmp_path / "s.safetensors", write=write, spelling="sglang")
    document = json.loads(path.read_text())
    assert document["model_type"] == "glm4_moe"
    assert document["kv_cache"]["dtype"] == "float8_e4m3fn"
    factors = document["kv_cache"]["scaling_factor"]
    assert list(factors) == ["0", "1", "2", "3"]
    largest = {str(one.scales.layer): float(max(one.scales.k[0], one.scales.v[0])) for one in result.report.layers}
    assert all(one == largest for one in factors.values())
    assert largest["1"] == result.report.layers[1].scales.v[0]


def test_unit_scales_need_no_statistics(converted, tmp_path):
    output, _, _ = converted
    result = run(output, write={"output": tmp_path / "one.safetensors"}, method="unit", scope="head")
    assert {tuple(one.ravel()) for one in load_file(result.written).values()} == {(1.0, 1.0)}
    assert run(output, write={"output": tmp_path / "none.safetensors", "force": True}).written is None


def test_the_same_scales_give_the_same_bytes(converted, tmp_path):
    output, statistics, _ = converted
    paths = [tmp_path / name for name in ("a.safetensors", "b.safetensors")]
    (tmp_path / "a.safetensors.draft").write_text("precious")
    for path in paths:
        run(output, statistics, write={"output": path}, method="mse")
    assert (tmp_path / "a.safetensors.draft").read_text() == "precious"  # of somebody else
    assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize("name", ["there.safetensors", "scales.json", "no/folder.safetensors"])
def test_a_sidecar_takes_no_place_that_is_none(name, converted, tmp_path):
    output, statistics, _ = converted
    (tmp_path / "there.safetensors").write_bytes(b"mine")
    with pytest.raises(UsageError):
        run(output, statistics, write={"output": tmp_path / name})
    assert (tmp_path / "there.safetensors").read_bytes() == b"mine"
    assert not list(tmp_path.glob("*.draft"))


def test_a_sidecar_lies_in_no_checkpoint(converted, tmp_path):
    """Published, it would be a file that no manifest names; without an index, a shard."""
    output, statistics, _ = converted
    before = directory_bytes(output)
    with pytest.raises(UsageError, match="lies in the source"):
        run(output, statistics, write={"output": output / "kv.safetensors"})
    assert directory_bytes(output) == before


def test_a_copy_of_the_output_holds_the_scales_and_is_verified(converted, tmp_path):
    output, statistics, source = converted
    before = directory_bytes(output)
    result = into(output, statistics, tmp_path / "kv")
    assert directory_bytes(output) == before
    tensors, plain = load_output(tmp_path / "kv"), load_output(output)
    added = {name: one for name, one in tensors.items() if name not in plain}
    assert sorted(added) == [f"model.layers.{n}.self_attn.{leaf}_scale" for n in (0, 1) for leaf in "kv"]
    assert added["model.layers.1.self_attn.k_scale"].tolist() == result.report.layers[1].scales.k.tolist()
    config = json.loads((tmp_path / "kv" / "config.json").read_text())
    assert config["quantization_config"].pop("kv_cache_scheme") == STATIC
    original = json.loads((output / "config.json").read_text())
    original["quantization_config"].pop("kv_cache_scheme", None)
    assert config == original
    origin = open_checkpoint(source.directory)
    for options in ({}, {"source": origin}, {"source": origin, "is_fast": True}):
        report = verify_output(tmp_path / "kv", num_jobs=2, **options)
        assert [finding for finding in report.findings if finding.is_error] == []
    assert verify_output(tmp_path / "kv", launch=Launch(engine="sglang")).is_good
    stored = report_of(tmp_path / "kv").stored
    assert len(stored) == 4
    assert not (tmp_path / "kv" / ".quantkit").exists()


def test_the_card_of_a_copy_tells_of_the_scales(converted, tmp_path):
    output, statistics, _ = converted
    into(output, statistics, tmp_path / "copy")
    card = (tmp_path / "copy" / "README.md").read_text()
    assert card == read_card(tmp_path / "copy")
    assert "FP8 KV scales are part of it (absmax, one for each tensor)" in card
    assert "are not part of this checkpoint" in (output / "README.md").read_text()


def test_files_that_do_not_change_are_links_or_copies(converted, tmp_path, monkeypatch):
    output, statistics, _ = converted
    into(output, statistics, tmp_path / "linked")
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(18, "Invalid cross-device link")))
    into(output, statistics, tmp_path / "copied")
    assert directory_bytes(tmp_path / "linked") == directory_bytes(tmp_path / "copied")
    shard = "model-00001-of-00002.safetensors"
    assert (tmp_path / "linked" / shard).samefile(output / shard)
    assert not (tmp_path / "copied" / shard).samefile(output / shard)
    assert not (tmp_path / "linked" / "config.json").samefile(output / "config.json")


@pytest.mark.parametrize("at", ["value", "subnormal", "shard", "config", "manifest"])
def test_verify_finds_what_is_done_to_scales(at, converted, tmp_path):
    output, statistics, source = converted
    into(output, statistics, tmp_path / "kv")
    manifest = json.loads((tmp_path / "kv" / "conversion.json").read_text())
    shard = tmp_path / "kv" / into_checkpoint.SHARD_NAME
    config = tmp_path / "kv" / "config.json"
    if at in ("value", "subnormal"):
        content = bytearray(shard.read_bytes())
        content[-4:] = int(at == "subnormal").to_bytes(4, "little")  # 0, and 1e-45
        shard.write_bytes(content)
    elif at == "shard":
        shard.unlink()
    elif at == "config":
        config.write_text(config.read_text().replace('"strategy": "tensor"', '"strategy": "token"'))
    else:
        del manifest["kv_scales"]
        (tmp_path / "kv" / "conversion.json").write_text(json.dumps(manifest))
    report = verify_output(tmp_path / "kv", source=open_checkpoint(source.directory), num_jobs=2)
    messages = [finding.message for finding in report.findings if finding.is_error]
    assert messages
    if at == "value":
        assert "is 0, and a scale is above 0" in messages
    if at == "subnormal":
        assert any(message.startswith("is 1.4013e-45: ") for message in messages)


def test_garbled_scales_of_a_manifest_are_said(converted, tmp_path):
    output, statistics, source = converted
    into(output, statistics, tmp_path / "kv")
    path = tmp_path / "kv" / "conversion.json"
    manifest = json.loads(path.read_text())
    manifest["kv_scales"]["tensors"] = 7
    path.write_text(json.dumps(manifest))
    with pytest.raises(VerificationError, match="its kv_scales are garbled"):
        verify_output(tmp_path / "kv", source=open_checkpoint(source.directory))


def test_what_no_scales_are_put_into(converted, tiny_checkpoint, tmp_path):
    output, statistics, source = converted
    with pytest.raises(UsageError, match="is no output of quantkit"):
        into(source.directory, statistics, tmp_path / "kv")
    into(output, statistics, tmp_path / "kv")
    with pytest.raises(UsageError, match="holds KV scales already"):
        into(tmp_path / "kv", statistics, tmp_path / "again")
    for target in (output, output / "inside", tmp_path / "kv"):
        with pytest.raises(UsageError):
            into(output, statistics, target)
    with pytest.raises(UsageError, match="not what its config is written in"):
        run(output, statistics, write={"into_checkpoint": True, "force": True}, spelling="modelopt")


def test_a_conversion_of_the_same_name_is_not_thrown_away(converted, tmp_path):
    output, statistics, _ = converted
    work = tmp_path / "kv.partial" / ".quantkit"
    work.mkdir(parents=True)
    (work / "run.json").write_text("{}")
    with pytest.raises(UsageError, match="holds work of a conversion"):
        into(output, statistics, tmp_path / "kv")
    assert (work / "run.json").exists()


def test_a_damaged_output_is_not_copied(converted, tmp_path):
    output, statistics, _ = converted
    with (output / "generation_config.json").open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(VerificationError, match="is not the file that the manifest names"):
        into(output, statistics, tmp_path / "kv")
    assert not (tmp_path / "kv").exists()
    assert not (tmp_path / "kv.partial").exists()


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "generation_config.json", "config.json"])
@pytest.mark.parametrize("has_links", [True, False])
def test_a_flipped_byte_is_not_vouched_for_anew(name, has_links, converted, tmp_path, monkeypatch):
    """A shard with its length, a file beside it, and one that is read and written anew."""
    output, statistics, _ = converted
    content = (output / name).read_bytes()
    if name.endswith("safetensors"):
        flipped = content[:-9] + bytes([content[-9] ^ 4]) + content[-8:]
    else:
        flipped = content.replace(b"2", b"3", 1) if b"2" in content else b"[]"
    assert len(flipped) == len(content)
    (output / name).write_bytes(flipped)
    if not has_links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(18, "Invalid cross-device link")))
    with pytest.raises(VerificationError, match="is damaged; put the undamaged file back") as caught:
        into(output, statistics, tmp_path / "kv")
    assert caught.value.file == name
    assert not (tmp_path / "kv").exists()
    assert not (tmp_path / "kv.partial").exists()
    (output / name).write_bytes(content)
    into(output, statistics, tmp_path / "kv")


@pytest.mark.slow
def test_a_kill_at_any_point_leaves_a_whole_copy_or_none(converted, tmp_path):
    """And the next run makes it, of the same bytes; the original is never touched."""
    output, statistics, _ = converted
    before = directory_bytes(output)
    faults = Faults(tmp_path / "first")
    (tmp_path / "first").mkdir()
    with faults.injected(fail_with(0), -1):
        into(output, statistics, tmp_path / "first" / "kv")
    assert verify_output(tmp_path / "first" / "kv").is_good
    whole = directory_bytes(tmp_path / "first" / "kv")
    assert len(faults.calls) > 20
    finished = 0
    for at, fault in some_kills(faults.calls):
        root = tmp_path / f"kill-{at}-{fault.__name__}"
        root.mkdir()
        assert killed(lambda: into(output, statistics, root / "kv"), Faults(root), fault, at)  # noqa: B023
        if (root / "kv").exists():
            finished += 1
            names = {name for name in directory_bytes(root / "kv") if not name.startswith(".quantkit")}
            assert names == set(whole)
        try:
            into(output, statistics, root / "kv")
        except QuantkitError as error:
            assert "exists already" in error.message  # noqa: PT017  (only where it was whole)
        assert {path.name for path in root.iterdir()} == {"kv"}
        assert directory_bytes(root / "kv") == whole
    assert finished
    assert directory_bytes(output) == before


@pytest.mark.parametrize("fault", [die_before, die_in_the_middle])
def test_a_kill_leaves_a_whole_sidecar_or_none(fault, converted, tmp_path):
    output, statistics, _ = converted
    run(output, statistics, write={"output": tmp_path / "whole.safetensors"})
    whole = (tmp_path / "whole.safetensors").read_bytes()
    for at in count():
        root = Path(tmp_path / f"kill-{at}")
        root.mkdir()
        path = root / "scales.safetensors"
        if not killed(lambda: run(output, statistics, write={"output": path}), Faults(root), fault, at):  # noqa: B023
            break
        if not path.exists():
            run(output, statistics, write={"output": path})
        assert path.read_bytes() == whole
        assert {one.name for one in root.iterdir()} == {path.name}
    assert at > 3
