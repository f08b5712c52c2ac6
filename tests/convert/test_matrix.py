"""Every form of source into every layout, with every choice for the rest and the draft: loaded back, or refused."""

import itertools

import numpy as np
import pytest
import torch

from quantkit.checkpoint.source import open_checkpoint
from quantkit.engines.launch import Launch
from quantkit.errors import RecipeError
from quantkit.families import family_of
from quantkit.numerics import bfloat16
from quantkit.numerics.packing import unpack_int4
from quantkit.plan.relayout import native_settings
from quantkit.transcode import read_words
from quantkit.verify.loading import check_loading
from quantkit.verify.verify import verify_output
from quantkit.weights.binding import bind_weights
from quantkit.weights.source_form import source_form
from tests.convert.helpers import convert

FORMS = ("fp8_block", "fused", "bf16", "int4_native", "w4afp8")
LAYOUTS = ("compressed-tensors", "w4afp8")
RESTS = ("bf16", "fp8", "fp8-native")
MTPS = ("int4", "bf16", "fp8", "drop")
MATRIX = list(itertools.product(FORMS, LAYOUTS, RESTS, MTPS))


def is_legal(form: str, layout: str, rest: str, mtp: str) -> bool:
    """What the README promises of each combination."""
    has_fp8, is_native = form in ("fp8_block", "fused", "w4afp8"), form in ("int4_native", "w4afp8")
    if layout == "w4afp8":
        return has_fp8 and rest in ("fp8", "fp8-native") and mtp in ("int4", "drop")
    if rest == "fp8-native" and not has_fp8:
        return False
    if is_native:
        return mtp in ("int4", "drop")
    return mtp != "fp8" or (has_fp8 and rest != "fp8-native")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A directory for each form, of one set of weights; and its experts as the definition of the form decodes them."""
    from tests.tiny import write_checkpoint

    root, made = tmp_path_factory.mktemp("sources"), {}
    for form in FORMS[:-1]:
        switches = {"fused_experts": True, "source_format": "fp8_block"} if form == "fused" else {"source_format": form}
        made[form] = write_checkpoint(root / form, mtp=True, **switches)
    convert(made["fp8_block"].directory, root / "w4afp8", layout="w4afp8")
    return {form: root / form for form in FORMS}, {form: one.decoded for form, one in made.items()}


def experts_of(directory):
    """INT4 weights of a directory as values, by our own reader."""
    checkpoint = open_checkpoint(directory)
    binding = bind_weights(checkpoint.tensors, source_form(checkpoint.quantization), {})
    decoded = {}
    for name, weight in binding.weights.items():
        if weight.is_native_int4:
            words = read_words(weight, 0, weight.num_rows, signed=True)
            codes = unpack_int4(words.packed, weight.num_cols).astype(np.float32)
            group_size = weight.num_cols // words.scale.shape[1]
            decoded[name] = codes * np.repeat(bfloat16.to_float32(words.scale), group_size, axis=1)
    return decoded


@pytest.mark.parametrize(("form", "layout", "rest", "mtp"), MATRIX)
def test_matrix(form, layout, rest, mtp, sources, tmp_path):
    directories, decoded = sources
    source = directories[form]
    settings = {"layout": layout, "rest": rest, "mtp": mtp}
    if not is_legal(form, layout, rest, mtp):
        with pytest.raises(RecipeError):
            convert(source, tmp_path / "out", **native_settings(open_checkpoint(source), settings))
        assert not (tmp_path / "out").exists()
        return
    engines = ("sglang",) if layout == "w4afp8" or rest == "fp8-native" else ("sglang", "vllm")
    engine = engines[0] if len(engines) == 1 else None
    convert(source, tmp_path / "out", engine=engine, **native_settings(open_checkpoint(source), settings))
    report = verify_output(tmp_path / "out", source=open_checkpoint(source))
    assert report.is_good, report.first_error()
    checkpoint = open_checkpoint(tmp_path / "out")
    for name in engines:
        verdict = check_loading(checkpoint, family_of(checkpoint.config), Launch(engine=name))
        assert not verdict.bad_rows, (name, verdict.bad_rows[0])
    made = experts_of(tmp_path / "out")
    assert made
    has_drafts = any(".layers.2." in name for name in made)
    assert has_drafts == (mtp == "int4")
    if form == "w4afp8":
        before = experts_of(source)
        assert all(np.array_equal(values, before[name]) for name, values in made.items())
        return
    for name, values in made.items():
        right = decoded[form].get(name, decoded["fp8_block"].get(name)).numpy()
        error = np.linalg.norm(values - right) / np.linalg.norm(right)
        assert error == 0 if form == "int4_native" else error < 0.12, (name, error)


@torch.no_grad()
@pytest.mark.parametrize("form", ["fp8_block", "bf16", "w4afp8", "int4_native"])
@pytest.mark.parametrize("rest", ["bf16", "fp8"])
def test_transformers_answers_as_the_source(form, rest, tiny_checkpoint, tmp_path):
    """Logits of what was converted, or moved, against those of the decoded source."""
    from transformers import AutoModelForCausalLM

    stored = "fp8_block" if form == "w4afp8" else form
    source = tiny_checkpoint(model_type="deepseek_v3", source_format=stored)
    directory = source.directory
    if form == "w4afp8":
        directory = tmp_path / "w4afp8"
        convert(source.directory, directory, layout="w4afp8")
    checkpoint = open_checkpoint(directory)
    convert(directory, tmp_path / "out", **native_settings(checkpoint, {"layout": "compressed-tensors", "rest": rest}))
    plain = tiny_checkpoint(name="plain", model_type="deepseek_v3", source_format="bf16")
    for name, values in source.decoded.items():
        plain.put(name, values.to(plain.tensor(name).dtype))
    plain.write()
    tokens = torch.arange(1, 20).unsqueeze(0)
    logits = [
        AutoModelForCausalLM.from_pretrained(one, dtype=torch.bfloat16)(tokens).logits.float()
        for one in (plain.directory, tmp_path / "out")
    ]
    difference = (logits[0] - logits[1]).norm() / logits[0].norm()
    assert difference < (0.02 if form == "int4_native" else 0.15)
