"""A smoke run: planned and checked as the whole, converted in part, marked, and never mixed with another run."""

import json
from pathlib import Path

import pytest

from quantkit.convert.conversion import Conversion
from quantkit.convert.convert import convert_checkpoint
from quantkit.convert.journal import Journal
from quantkit.errors import SourceError, UsageError, VerificationError
from quantkit.plan.limits import Limits
from quantkit.plan.make import make_plan
from quantkit.plan.part import limited
from quantkit.sources import resolve_source
from quantkit.verify.verify import verify_output
from tests.convert.helpers import convert, directory_bytes, load_output, same


def smoke(source: Path, target: Path, *, resume=True, **limits):
    resolved = resolve_source(str(source))
    plan = limited(make_plan(resolved.recipe, resolved.family, resolved.checkpoint), Limits(**limits))
    return convert_checkpoint(Conversion(plan=plan, target=target, num_jobs=2, resume=resume))


def verified(output: Path, source: Path, **options):
    return verify_output(output, source=resolve_source(str(source)).checkpoint, **options)


def layers_of(tensors):
    return {int(name.split("layers.")[1].split(".")[0]) for name in tensors if "layers." in name}


@pytest.mark.parametrize(
    ("switches", "limits"),
    [
        ({}, {"num_shards": 1}),
        ({"scale_only_shard": True}, {"num_shards": 2}),
        ({"mtp": True}, {"layers": (0, 0)}),
        ({"mtp": True}, {"layers": (1, 2)}),
        ({"model_type": "kimi_k25"}, {"layers": (1, 1)}),
        ({"fused_experts": True}, {"layers": (1, 1), "num_shards": 1}),
        ({"source_format": "bf16", "cross_shard": False}, {"layers": (1, 1)}),
    ],
)
def test_what_is_converted_is_what_the_whole_run_makes_of_it(switches, limits, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(num_shards=4, **switches).directory
    convert(source, tmp_path / "whole")
    smoke(source, tmp_path / "part", **limits)
    whole, part = load_output(tmp_path / "whole"), load_output(tmp_path / "part")
    assert 0 < len(part) < len(whole)
    assert all(same(tensor, whole[name]) for name, tensor in part.items())
    assert (tmp_path / "part" / "config.json").read_bytes() == (tmp_path / "whole" / "config.json").read_bytes()
    if "layers" in limits:
        first, last = limits["layers"]
        assert layers_of(part) <= set(range(first, last + 1))
        if "num_shards" not in limits:
            assert layers_of(part) == set(range(first, last + 1))
            outside = {name for name in whole if "layers." not in name}
            assert outside  # embedding, norm, head
            assert outside <= set(part)
    for report in (verified(tmp_path / "part", source), verified(tmp_path / "part", source, is_fast=True)):
        assert report.is_good, report.findings
        assert [finding.check for finding in report.findings] == ["partial"]


def test_a_partial_output_says_so_and_a_whole_one_does_not(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    report = smoke(source, tmp_path / "part", layers=(1, 1), num_shards=1)
    convert(source, tmp_path / "whole")
    parts = json.loads((tmp_path / "whole" / "conversion.json").read_text())["parts"]
    document = json.loads((tmp_path / "part" / "conversion.json").read_text())
    assert document["partial"] == {
        "limit_shards": 1,
        "layers": [1, 1],
        "num_shards": 1,
        "of_num_shards": 2,
        "num_weights": len(list(report.plan.jobs)),
        "of_num_weights": sum(part["num_weights"] for part in parts),
    }
    _, front_matter, text = (tmp_path / "part" / "README.md").read_text().split("---\n", maxsplit=2)
    assert "base_model" not in front_matter
    first_line = text.strip().splitlines()[0]
    assert first_line.startswith("**Partial: layers 1-1 and what lies in no layer, 1 of 2 shards with ")
    assert document["warnings"][0] == report.plan.partial.notice
    assert "partial" not in json.loads((tmp_path / "whole" / "conversion.json").read_text())
    assert "partial" not in (tmp_path / "whole" / "README.md").read_text().lower()


def test_only_source_shards_that_are_needed_are_read_and_named(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(num_shards=4, cross_shard=True).directory
    smoke(source, tmp_path / "part", num_shards=1)
    document = json.loads((tmp_path / "part" / "conversion.json").read_text())
    names = [f"model-0000{number}-of-00004.safetensors" for number in (1, 2)]  # scales lie in the next shard
    assert list(document["source"]["shards"]) == names
    (source / "model-00004-of-00004.safetensors").touch()
    assert verified(tmp_path / "part", source).is_good


def test_the_whole_is_checked_before_a_part_is_made(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(num_shards=4, write=False)
    source.remove("model.layers.1.mlp.experts.2.up_proj.weight_scale_inv")  # far behind the first shard
    source.write()
    with pytest.raises(SourceError):
        smoke(source.directory, tmp_path / "part", num_shards=1)


@pytest.mark.parametrize("layers", [(1, 0), (2, 2), (0, 2), (0, 999_999)])
def test_layers_that_there_are_not_are_refused(layers, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    with pytest.raises(UsageError, match="there are not; there are 0 to 1"):
        smoke(source, tmp_path / "part", layers=layers)


def test_runs_with_other_limits_never_go_on_from_each_other(tiny_checkpoint, tmp_path, monkeypatch):
    source = tiny_checkpoint(num_shards=4)
    original = Journal.add_output

    def stop(*arguments):
        original(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Journal, "add_output", stop)
        convert(source.directory, tmp_path / "out")
    for limits in ({"num_shards": 2}, {"layers": (0, 1)}, {"num_shards": 4}):  # the last ones leave nothing out
        with pytest.raises(UsageError, match="holds work of a run that differs: partial was null and is"):
            smoke(source.directory, tmp_path / "out", **limits)
    smoke(source.directory, tmp_path / "out", num_shards=2, resume=False)
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["partial"]["limit_shards"] == 2


def test_a_whole_run_never_goes_on_from_a_smoke_run(tiny_checkpoint, tmp_path, monkeypatch):
    from quantkit.convert import convert as convert_module

    source = tiny_checkpoint(num_shards=4).directory

    def stop(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(convert_module, "complete", stop)
        smoke(source, tmp_path / "out", layers=(0, 1))
    assert (tmp_path / "out.partial").is_dir()
    with pytest.raises(UsageError, match="holds work of a run that differs: partial was"):
        convert(source, tmp_path / "out")
    with pytest.raises(UsageError, match=r"partial.layers was \[0, 1\] and is \[0, 0\]"):
        smoke(source, tmp_path / "out", layers=(0, 0))
    smoke(source, tmp_path / "out", layers=(0, 1))
    smoke(source, tmp_path / "again", layers=(0, 1))
    assert directory_bytes(tmp_path / "out") == directory_bytes(tmp_path / "again")


@pytest.mark.parametrize(
    "partial",
    [True, {}, [], {"layers": [1]}, {"layers": ["0", 1]}, {"limit_shards": 0}, {"limit_shards": True}, {"layers": 3}],
)
def test_garbled_limits_are_named(partial, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    smoke(source, tmp_path / "part", num_shards=1)
    path = tmp_path / "part" / "conversion.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "partial": partial}))
    with pytest.raises(VerificationError, match="limits are garbled"):
        verify_output(tmp_path / "part")


def test_a_part_is_verified_as_the_part_that_it_is(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    smoke(source, tmp_path / "part", layers=(0, 0))
    path = tmp_path / "part" / "conversion.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "partial": {**document["partial"], "layers": [0, 1]}}))
    assert not verified(tmp_path / "part", source).is_good
    path.write_text(json.dumps({**document, "partial": {**document["partial"], "layers": [0, 7]}}))
    with pytest.raises(VerificationError, match="made from another source"):
        verified(tmp_path / "part", source)
    del document["partial"]  # and a part that hides it is incomplete
    path.write_text(json.dumps(document))
    assert not verify_output(tmp_path / "part").is_good
