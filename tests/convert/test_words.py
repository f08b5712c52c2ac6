"""A conversion with words from elsewhere: they are written as they are, and what AWQ has multiplied is found again."""

import json

import numpy as np
import pytest
import torch

from quantkit.convert.conversion import Conversion
from quantkit.convert.convert import convert_checkpoint
from quantkit.convert.ranks import convert_share
from quantkit.errors import SourceError, UsageError, VerificationError
from quantkit.numerics.packing import Int4Words, pack_int4, unpack_int4
from quantkit.plan.make import make_plan
from quantkit.plan.plan import Action
from quantkit.recipe import override
from quantkit.sources import resolve_source
from quantkit.transcode import search_values
from quantkit.verify.verify import verify_output
from quantkit.words import finish_words, open_words, write_words
from tests.convert.helpers import convert as convert_alone
from tests.convert.helpers import directory_bytes, load_output

SEEN = {"tokens": "0" * 64, "sequences": 8, "length": 64, "streaming": True}
GROUP = 32


def planned(tiny, method, **changes):
    resolved = resolve_source(str(tiny.directory))
    recipe = override(resolved.recipe, method=method, calibration=SEEN, **changes)
    return make_plan(recipe, resolved.family, resolved.checkpoint)


def shapes_of(plan):
    jobs = [job for job in plan.jobs if job.action == Action.INT4]
    return {job.weight.module: (job.weight.num_rows, job.weight.num_cols) for job in jobs}


def written(directory, plan, values, *, searched=()):
    """Words of these float32 weights by the search, one code of each changed where it does little."""
    document = {"method": plan.recipe.method, "by": "quantkit", "parameters": {"scales": "search"}}
    directory.mkdir()
    shapes = {module: weight_RC.shape for module, weight_RC in values.items()}
    with write_words(directory / "all.safetensors", shapes, group_size=GROUP) as writer:
        for module, weight_RC in values.items():
            codes_RC, scale_RG = search_values(weight_RC, group_size=GROUP, signed=True, moments_C=None)
            codes_RC[1, 2] = np.clip(codes_RC[1, 2] + 1, -8, 6)
            writer.add(module, Int4Words(pack_int4(codes_RC), scale_RG))
    finish_words(directory, document, searched=searched)
    return open_words(directory)


def decoded_of(tiny, plan):
    return {module: tiny.decoded[f"{module}.weight"].numpy() for module in shapes_of(plan)}


def convert(plan, target, words, num_jobs=2):
    return convert_checkpoint(Conversion(plan=plan, target=target, num_jobs=num_jobs, words=words))


def test_words_are_written_as_they_are_by_any_number_of_workers(tiny_checkpoint, tmp_path):
    tiny = tiny_checkpoint()
    plan = planned(tiny, "gptq")
    values = decoded_of(tiny, plan)
    left = sorted(values)[0]
    words = written(tmp_path / "words", plan, {m: w for m, w in values.items() if m != left}, searched=[left])
    report = convert(plan, tmp_path / "out", words)
    convert(plan, tmp_path / "again", words, num_jobs=1)
    assert directory_bytes(tmp_path / "out") == directory_bytes(tmp_path / "again")
    convert_alone(tiny.directory, tmp_path / "searched")
    tensors, searched = load_output(tmp_path / "out"), load_output(tmp_path / "searched")
    for module, (num_rows, _) in shapes_of(plan).items():
        if module == left:  # the search, as without words
            for leaf in ("weight_packed", "weight_scale"):
                assert tensors[f"{module}.{leaf}"].equal(searched[f"{module}.{leaf}"])
            continue
        expected = words.read(module, 0, num_rows, signed=True)
        np.testing.assert_array_equal(tensors[f"{module}.weight_packed"].numpy(), expected.packed)
        got = tensors[f"{module}.weight_scale"].view(torch.uint16).numpy()
        np.testing.assert_array_equal(got, expected.scale)
    manifest = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert manifest["calibration"]["words_sha256"] == words.sha256
    assert manifest["recipe"]["calibration"] == SEEN
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{len(values) - 1} weights are chosen by GPTQ (quantkit) over 8 sequences of 64 tokens." in card
    verified = verify_output(tmp_path / "out", source=plan.checkpoint, num_jobs=2)
    assert verified.is_good
    assert verified.classes == report.classes


def test_a_run_does_not_go_on_with_other_words(tiny_checkpoint, tmp_path):
    tiny = tiny_checkpoint()
    plan = planned(tiny, "gptq")
    values = decoded_of(tiny, plan)
    words = written(tmp_path / "words", plan, values)
    values[sorted(values)[0]] = values[sorted(values)[0]] * 1.01
    other = written(tmp_path / "other", plan, values)
    convert_share(Conversion(plan=plan, target=tmp_path / "out", num_jobs=1, words=words, rank=0))  # all but its end
    with pytest.raises(UsageError, match="words has changed"):
        convert(plan, tmp_path / "out", other)
    convert(plan, tmp_path / "out", words)


def smoothed(values, seed=3):
    """As AWQ leaves them: rows of up divided, columns of down multiplied."""
    rng, made = np.random.default_rng(seed), dict(values)
    for module in values:
        if module.endswith("up_proj"):
            factor_I = np.exp(0.5 * rng.standard_normal(len(values[module]))).astype(np.float32)
            made[module] = values[module] / factor_I[:, None]
            down = module.removesuffix("up_proj") + "down_proj"
            made[down] = values[down] * factor_I
    return made


def error_of(words, module, weight_RC):
    """Relative, of the words against a weight."""
    read = words.read(module, 0, len(weight_RC), signed=True)
    scale = torch.from_numpy(read.scale.copy()).view(torch.bfloat16).float().repeat_interleave(GROUP, 1).numpy()
    difference_RC = unpack_int4(read.packed, weight_RC.shape[1]) * scale - weight_RC
    return float(np.linalg.norm(difference_RC) / np.linalg.norm(weight_RC))


def test_what_awq_has_multiplied_is_found_again_and_no_error(tiny_checkpoint, tmp_path):
    tiny = tiny_checkpoint()
    plan = planned(tiny, "awq")
    values = decoded_of(tiny, plan)
    changed = smoothed(values)
    words = written(tmp_path / "words", plan, changed)
    report = convert(plan, tmp_path / "out", words)
    assert report.classes[0].worst == pytest.approx(max(error_of(words, m, w) for m, w in changed.items()), rel=0.02)
    assert report.classes[0].worst < 0.13
    assert max(error_of(words, m, w) for m, w in values.items()) > 0.4  # which is what the source itself would say
    verified = verify_output(tmp_path / "out", source=plan.checkpoint, num_jobs=2)
    assert verified.is_good
    assert verified.classes == report.classes


@pytest.mark.parametrize("leaf", ["gate_proj", "up_proj", "down_proj"])
def test_words_of_another_weight_are_found(leaf, tiny_checkpoint, tmp_path):
    """Whatever is multiplied: rows turned round, or another expert's."""
    tiny = tiny_checkpoint()
    plan = planned(tiny, "awq")
    values = decoded_of(tiny, plan)
    one, two = (f"model.layers.1.mlp.experts.{expert}.{leaf}" for expert in (0, 1))
    values[one] = values[two]
    words = written(tmp_path / "words", plan, values)
    with pytest.raises(VerificationError, match="relative error") as caught:
        convert(plan, tmp_path / "out", words)
    assert caught.value.tensor == f"{one}.weight"
    assert not (tmp_path / "out").exists()


def test_a_damaged_scale_ends_the_work(tiny_checkpoint, tmp_path):
    tiny = tiny_checkpoint()
    plan = planned(tiny, "gptq")
    words = written(tmp_path / "words", plan, decoded_of(tiny, plan))
    module = "model.layers.1.mlp.experts.2.up_proj"
    stored = words.tensors[f"{module}.scale"]
    with stored.path.open("r+b") as stream:
        stream.seek(stored.begin)
        stream.write(b"\xc0\x7f")
    with pytest.raises(SourceError, match="holds the scale nan for row 0, group 0") as caught:
        convert(plan, tmp_path / "out", words)
    assert caught.value.tensor == module
