"""What lies beside the weights is copied, or named with the reason why not."""

import json

from tests.convert.helpers import convert


def test_everything_but_weights_indexes_and_caches_is_copied(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    directory = source.directory
    copied = ["modeling_x.py", "chat_template.jinja", "tiktoken.model", "sub/deep/vocab.txt", "generation_config.json"]
    skipped = ["old.bin", "model.gguf", ".gitattributes", "pytorch_model.bin.index.json", "sub/w.safetensors"]
    for name in (*copied, *skipped, "README.md", ".cache/x", "__pycache__/y.pyc"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(f"content of {name}")
    (tmp_path / "secret").write_text("secret")
    (directory / "leak.txt").symlink_to(tmp_path / "secret")
    (directory / "dangling.txt").symlink_to(tmp_path / "nothing")
    (directory / "outside").symlink_to(tmp_path)
    convert(directory, tmp_path / "out")
    out = tmp_path / "out"
    for name in copied:
        assert (out / name).read_text() == f"content of {name}"
    assert (out / "SOURCE_README.md").read_text() == "content of README.md"
    assert "content of README.md" not in (out / "README.md").read_text()
    listed = json.loads((out / "conversion.json").read_text())["skipped_files"]
    for name in (*skipped, "leak.txt", "dangling.txt", "outside", ".cache", "__pycache__"):
        assert name in listed, name
        assert not (out / name).exists(), name


def test_modelopt_declaration_does_not_reach_the_output(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(source_format="modelopt", write=False)
    del source.config["quantization_config"]
    source.write()
    declaration = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    }
    (source.directory / "hf_quant_config.json").write_text(json.dumps(declaration))
    convert(source.directory, tmp_path / "out")
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert section["quant_method"] == "compressed-tensors"


def test_static_scales_of_the_source_are_dropped_and_named(tiny_checkpoint, tmp_path):
    import torch

    source = tiny_checkpoint(write=False)
    names = [
        "model.layers.1.mlp.experts.0.up_proj.input_scale",
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.v_proj.v_scale",
    ]
    for name in names:
        source.put(name, torch.tensor(0.5))
    source.write()
    report = convert(source.directory, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert set(manifest["dropped_tensors"]) == set(names)
    assert any("3 static activation or KV scales" in warning for warning in report.plan.warnings)
