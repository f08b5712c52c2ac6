"""Whatever is done to a good output, verify finds it."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.reader import hash_file
from quantkit.checkpoint.source import open_checkpoint
from quantkit.errors import VerificationError
from quantkit.verify.verify import verify_output
from tests.convert.helpers import convert

EXPERT = "model.layers.1.mlp.experts.2.up_proj"
SHARD_2 = "model-00002-of-00002.safetensors"


@pytest.fixture
def converted(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    (source.directory / "chat_template.jinja").write_text("{{ x }}")
    convert(source.directory, tmp_path / "out")
    return source, tmp_path / "out"


def messages(output, source=None, **options):
    checkpoint = open_checkpoint(source.directory) if source else None
    report = verify_output(output, source=checkpoint, num_jobs=2, **options)
    return [f"{finding.tensor or finding.file}: {finding.message}" for finding in report.findings if finding.is_error]


def forge_manifest(output):
    """Hashes of the files as they now are: what a tool that only hashes would accept."""
    path = output / "conversion.json"
    manifest = json.loads(path.read_text())
    for name in manifest["output"]["files"]:
        if (output / name).exists():
            record = {"bytes": (output / name).stat().st_size, "sha256": hash_file(output / name)}
            manifest["output"]["files"][name] = record
    path.write_text(json.dumps(manifest))


def edit_shard(output, name, change):
    """Change a tensor of the output, with all hashes made right again."""
    shard = json.loads((output / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(output / shard)
    change(tensors)
    save_file(tensors, output / shard, {"format": "pt"})
    forge_manifest(output)


def edit_json(output, name, change):
    document = json.loads((output / name).read_text())
    change(document)
    (output / name).write_text(json.dumps(document))
    forge_manifest(output)


def test_good_output_is_good(converted):
    source, output = converted
    assert messages(output) == []
    assert messages(output, source) == []
    assert messages(output, source, is_fast=True) == []
    report = verify_output(output, source=open_checkpoint(source.directory))
    assert len(report.errors) == 12
    assert 0.05 < report.classes[0].relative < 0.0822


def test_errors_against_the_source_are_those_that_were_recorded(converted):
    source, output = converted
    report = verify_output(output, source=open_checkpoint(source.directory))
    recorded = json.loads((output / "conversion.json").read_text())["errors"]["routed_expert"]
    assert recorded["relative_error"] == report.classes[0].relative
    assert recorded["worst_weight"] == report.classes[0].worst_name


def test_one_flipped_bit_anywhere(converted):
    _, output = converted
    for path in sorted(output.rglob("*")):
        if path.name == "conversion.json":
            continue
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        assert any("sha256" in message and path.name in message for message in messages(output)), path
        content[-1] ^= 1
        path.write_bytes(content)
    assert messages(output) == []


def test_missing_truncated_and_longer_files(converted):
    _, output = converted
    path = output / SHARD_2
    size = path.stat().st_size
    os.truncate(path, size - 8)
    assert messages(output)
    assert len([message for message in messages(output) if "manifest" in message]) == 1  # and no hash of it
    os.truncate(path, size + 8)
    assert messages(output)
    path.unlink()
    assert f"{SHARD_2}: is missing" in messages(output)


def test_stray_shard_is_an_error_and_a_stray_file_is_named(converted):
    _, output = converted
    (output / "notes.txt").write_text("x")
    report = verify_output(output)
    assert report.is_good
    assert [finding.file for finding in report.findings] == ["notes.txt"]
    (output / "old.safetensors").write_bytes((output / SHARD_2).read_bytes())
    assert messages(output)


def test_manifest_missing_or_garbled(converted):
    _, output = converted
    path = output / "conversion.json"
    good = json.loads(path.read_text())
    shard = {"bytes": 1, "sha256": "0"}
    garbled = [
        *("{", "{}", '{"format": 99}', "[]", '{"format": 1, "recipe": {}, "source": {"shards": []}}'),
        json.dumps(good | {"family": "nothing"}),
        json.dumps(good | {"recipe": good["recipe"] | {"group_size": 7}}),
        json.dumps(good | {"output": {"files": {SHARD_2: {"bytes": "x", "sha256": "0"}}}}),
        *(json.dumps(good | {"output": {"files": {name: shard}}}) for name in ("../x", "/etc/passwd", "", "a/../../b")),
    ]
    for text in garbled:
        path.write_text(text)
        with pytest.raises(VerificationError):
            verify_output(output)
    path.unlink()
    with pytest.raises(VerificationError, match="is missing"):
        verify_output(output)


def test_index_errors_behind_a_forged_manifest(converted):
    _, output = converted
    name = "model.safetensors.index.json"
    edit_json(output, name, lambda index: index["metadata"].update(total_size=1))
    assert any("total_size" in message for message in messages(output))
    total = sum(tensor.spec.num_bytes for tensor in open_checkpoint(output).tensors.values())
    edit_json(output, name, lambda index: index["metadata"].update(total_size=total))
    assert messages(output) == []
    edit_json(output, name, lambda index: index["weight_map"].pop("lm_head.weight"))
    assert any("lm_head.weight" in message for message in messages(output))


def test_tensor_that_is_gone_or_too_many(converted):
    _, output = converted
    index = output / "model.safetensors.index.json"
    edit_json(output, index.name, lambda document: document["weight_map"].pop(EXPERT + ".weight_scale"))
    edit_shard(output, EXPERT + ".weight_packed", lambda tensors: tensors.pop(EXPERT + ".weight_scale"))
    assert any("weight_scale is missing" in message for message in messages(output))


def test_config_that_contradicts_the_tensors(converted):
    _, output = converted

    def section(config):
        return config["quantization_config"]

    def group(config):
        return section(config)["config_groups"]["group_0"]

    changes = {
        "ignores an expert": lambda config: section(config)["ignore"].append(f"re:.*{EXPERT}$"),
        "does not ignore attention": lambda config: section(config)["ignore"].remove("re:.*self_attn.*"),
        "another group size": lambda config: group(config)["weights"].update(group_size=64),
        "another format": lambda config: section(config).update(format="mixed-precision"),
        "no section": lambda config: config.pop("quantization_config"),
        "eight bits": lambda config: group(config)["weights"].update(num_bits=8),
        "ignore of numbers": lambda config: section(config).update(ignore=[1]),
        "ignore that is no pattern": lambda config: section(config).update(ignore=["re:("]),
        "ignore that is a string": lambda config: section(config).update(ignore="lm_head"),
        "other layers": lambda config: config.update(num_hidden_layers=3),
        "other width": lambda config: config.update(hidden_size=512),
    }
    original = (output / "config.json").read_text()
    for name, change in changes.items():
        edit_json(output, "config.json", change)
        assert messages(output), name
        (output / "config.json").write_text(original)
    forge_manifest(output)
    assert messages(output) == []


@pytest.mark.parametrize(
    ("name", "index"),
    [
        (EXPERT + ".weight_scale", (0, 0)),
        (EXPERT + ".weight_packed", (5, 3)),
        (EXPERT + ".weight_shape", (0,)),
        ("model.layers.0.self_attn.o_proj.weight", (1, 2)),
        ("model.norm.weight", (3,)),
        ("model.layers.1.mlp.gate.e_score_correction_bias", (2,)),
    ],
)
def test_wrong_numbers_behind_a_forged_manifest(name, index, converted):
    source, output = converted

    def change(tensors):
        tensor = tensors[name]
        tensor[index] = tensor[index] * 3 + 1 if tensor.is_floating_point() else tensor[index] + 0x1234567
        if name.endswith("weight_packed"):
            tensor[:] = tensor.flip(0)  # codes of other rows: still INT4, and wrong
        if name.endswith("weight_scale"):
            tensor *= 1.5

    edit_shard(output, name, change)
    assert messages(output) == []  # nothing but the source can tell
    assert any(name.split(".weight_")[0] in message for message in messages(output, source))


def test_fast_skips_only_what_needs_dequantizing(converted):
    source, output = converted
    edit_shard(output, EXPERT + ".weight_scale", lambda tensors: tensors[EXPERT + ".weight_scale"].mul_(1.5))
    assert messages(output, source, is_fast=True) == []
    assert messages(output, source)
    edit_shard(output, "model.norm.weight", lambda tensors: tensors["model.norm.weight"].mul_(1.5))
    assert any("model.norm.weight" in message for message in messages(output, source, is_fast=True))


def test_another_source_is_noticed(converted, tiny_checkpoint):
    _, output = converted
    other = tiny_checkpoint("other", seed=1)
    assert any("not the shard" in message for message in messages(output, other))


def test_nan_scale_fails(converted):
    source, output = converted

    def change(tensors):
        tensors[EXPERT + ".weight_scale"][0, 0] = float("nan")

    edit_shard(output, EXPERT + ".weight_scale", change)
    assert any(EXPERT in message for message in messages(output, source))
    assert torch.isnan(load_file(output / SHARD_2).get(EXPERT + ".weight_scale", torch.tensor(float("nan")))).any()
