"""An evaluation against transformers' whole models and the definitions of its figures."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quantkit.errors import SourceError, UsageError
from quantkit.evaluate import run as run_module
from quantkit.evaluate.report import Request, make_report
from quantkit.evaluate.run import Pair, evaluate
from quantkit.evaluate.weights import compare_weights
from quantkit.integrity.weight_errors import class_errors
from quantkit.sources import resolve_source
from quantkit.streaming import Tokens
from quantkit.verify.verify import verify_output
from tests.classic import make_classic
from tests.convert.helpers import convert
from tests.streaming.decoded import decoded_output
from tests.streaming.models import lively_checkpoint, whole_model
from tests.streaming.test_forward import IDS, opened

TOKENS = Tokens(ids_NS=IDS.numpy())


def request(tmp_path, **changes):
    options = {"work": None, "beside": tmp_path, "is_fast": False, "allow_other_model": False, "num_jobs": 2}
    return Request(**options | changes)


def report_of(tmp_path, first, second, **changes):
    pair = Pair(opened(first), opened(second))
    return make_report(pair, TOKENS, request(tmp_path, **changes), report_progress=lambda _, __: None)


def quiet(source, output, **options):
    return evaluate(Pair(opened(source), opened(output)), TOKENS, work=None, **options)


def converted(tmp_path, model_type="glm_moe_dsa", **changes):
    source = lively_checkpoint(tmp_path / "source", model_type)
    convert(source.directory, tmp_path / "out", **changes)
    return source, SimpleNamespace(config=source.config, decoded=decoded_output(tmp_path / "out"))


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "glm4_moe", "kimi_k25"])
def test_figures_are_those_of_the_whole_models(tmp_path, model_type):
    source, meant = converted(tmp_path, model_type)
    logits = [whole_model(one, model_type)(IDS).logits[:, :-1].double() for one in (source, meant)]
    log_p, log_q = (torch.log_softmax(one, -1) for one in logits)
    found = quiet(tmp_path / "source", tmp_path / "out").divergence
    # The logits of the oracle are another float32 sum, a few 1e-6 off: so is what is first order in them, and the KL
    # divergence is off by that times the difference of the distributions.
    slack = 5e-6 * float((log_p - log_q).abs().mean())
    kl_NP = (log_p.exp() * (log_p - log_q)).sum(-1)
    np.testing.assert_allclose(found.kl, kl_NP.numpy().ravel(), rtol=0.02, atol=slack)
    for name, one in (("source_nll", log_p), ("output_nll", log_q)):
        expected = -one.gather(-1, IDS[:, 1:, None])
        np.testing.assert_allclose(getattr(found, name), expected.numpy().ravel(), atol=1e-5)
    top_NP1 = log_p.argmax(-1, keepdim=True)
    assert np.mean(found.same_top == (log_q.argmax(-1) == top_NP1[..., 0]).numpy().ravel()) > 0.98  # but for near ties
    shift = log_q.exp().gather(-1, top_NP1) - log_p.exp().gather(-1, top_NP1)
    np.testing.assert_allclose(found.top_shift, shift.numpy().ravel(), atol=1e-6)
    assert found.kl.mean() > 100 * slack  # it says something


@torch.no_grad()
def test_errors_of_layers_are_those_of_the_whole_models(tmp_path):
    source, meant = converted(tmp_path)
    hidden, added = [], []
    for one in (source, meant):
        model = whole_model(one, "glm_moe_dsa")
        model.model.layers[1].mlp.experts.register_forward_hook(lambda _, __, answer: added.append(answer.double()))
        model.model.norm = torch.nn.Identity()  # the last of transformers' hidden states is normed
        hidden.append([state.double() for state in model(IDS, output_hidden_states=True).hidden_states[1:]])
    layers = quiet(tmp_path / "source", tmp_path / "out").layers

    def relative(one, other):
        return float((one - other).norm() / one.norm())

    assert [one.layer for one in layers] == [0, 1]
    for layer, *states in zip(layers, *hidden, strict=True):
        assert layer.hidden == pytest.approx(relative(*states), rel=1e-3)
    assert layers[0].experts is None
    assert layers[1].experts == pytest.approx(relative(*added), rel=1e-3)
    assert layers[1].experts > 0.01


def test_a_model_is_no_distance_from_itself(tmp_path):
    lively_checkpoint(tmp_path / "source", "glm_moe_dsa")
    found = report_of(tmp_path, tmp_path / "source", tmp_path / "source")
    assert found.summary.kl.maximum == 0
    assert found.summary.ratio.value == 1
    assert found.summary.same_top.value == 1
    assert found.summary.top_shift_rms == 0
    assert {(one.hidden, one.experts or 0.0) for one in found.layers} == {(0.0, 0.0)}
    assert {one.worst for one in found.classes} == {0.0}
    assert found.missing == ()
    assert all(one.source_bytes == one.output_bytes > 0 for one in found.sizes)


def test_layers_of_a_vision_part_are_none_of_the_models(tmp_path):
    source = lively_checkpoint(tmp_path / "source", "kimi_k25")
    source.put("vision_tower.encoder.layers.1.fc.weight", torch.ones(4, 4, dtype=torch.bfloat16))
    source.write()
    found = report_of(tmp_path, source.directory, source.directory)
    assert "vision" in {one.role for one in found.classes}
    assert found.layer_classes.keys() == {0, 1}
    assert not any(one.role == "vision" for classes in found.layer_classes.values() for one in classes)


def test_two_runs_and_files_give_the_same_figures(tmp_path):
    converted(tmp_path)
    found = [
        report_of(tmp_path, tmp_path / "source", tmp_path / "out", work=work)
        for work in (None, None, tmp_path / "work")
    ]
    assert found[0].summary == found[1].summary == found[2].summary
    assert found[0].layers == found[1].layers == found[2].layers


def test_blocks_of_the_head_do_not_change_figures(tmp_path, monkeypatch):
    converted(tmp_path)
    whole = quiet(tmp_path / "source", tmp_path / "out").divergence
    monkeypatch.setattr("quantkit.streaming.model.HEAD_ROWS", 48)
    monkeypatch.setattr(run_module, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr(run_module, "_TOKENS_AT_ONCE", 11)
    parts = quiet(tmp_path / "source", tmp_path / "out").divergence
    np.testing.assert_allclose(parts.kl, whole.kl, rtol=0.02, atol=1e-8)
    np.testing.assert_allclose(parts.output_nll, whole.output_nll, atol=1e-5)


def test_progress_is_all_bytes_of_both_layers_and_heads(tmp_path):
    converted(tmp_path)
    seen = []
    pair = Pair(opened(tmp_path / "source"), opened(tmp_path / "out"))
    evaluate(pair, TOKENS, work=None, report_progress=lambda stage, done: seen.append((stage, done)))
    layers, heads = dict.fromkeys(stage for stage, _ in seen)
    for stage, part in ((layers, ".layers."), (heads, "lm_head.weight")):
        weights = [one for model in pair for name, one in model.binding.weights.items() if part in name]
        expected = sum(one.stored_bytes for one in weights)
        assert sum(done for one, done in seen if one == stage) == stage.total_bytes == expected


@pytest.mark.parametrize("changes", [{}, {"group_size": 128, "signed_scales": False}, {"zero_points": True}])
def test_weight_errors_are_those_of_verify(tmp_path, changes):
    """Which reads packed words in numba, and takes the source rounded to BF16 where it is not quantized."""
    converted(tmp_path, **changes)
    source = resolve_source(str(tmp_path / "source")).checkpoint
    expected = {one.name: one for one in verify_output(tmp_path / "out", source=source).errors}
    pair = Pair(opened(tmp_path / "source"), opened(tmp_path / "out"))
    found = compare_weights(pair.source.binding, pair.output.binding, pair.source.family, num_jobs=2)
    by_name = {one.name: one for one in found.errors}
    assert len(expected) == 12
    for name, one in expected.items():
        assert by_name[name].relative == pytest.approx(one.relative, rel=1e-5)
    rounded = by_name["model.layers.1.self_attn.o_proj.weight"].relative
    assert 0.0005 < rounded < 2**-8
    assert by_name["model.layers.1.mlp.gate.weight"].relative == 0


def test_weights_of_other_tools_are_compared_by_what_they_mean(tmp_path):
    source = lively_checkpoint(tmp_path / "source", "glm4_moe", source_format="bf16")
    other = lively_checkpoint(tmp_path / "other", "glm4_moe", source_format="bf16")
    made = make_classic(other, "awq", symmetric=False)
    pair = Pair(opened(tmp_path / "source"), opened(tmp_path / "other"))
    found = compare_weights(pair.source.binding, pair.output.binding, pair.source.family, num_jobs=1)
    by_name = {one.name: one for one in found.errors}
    for module, (unsigned, scale, zero) in made.items():
        wide = [one.float().repeat_interleave(32, 1) for one in (scale, zero)]
        weight = source.decoded[f"{module}.weight"].double()
        expected = float((((unsigned - wide[1]) * wide[0]).double() - weight).norm() / weight.norm())
        assert by_name[f"{module}.weight"].relative == pytest.approx(expected, rel=1e-9)
    (worst,) = [one for one in class_errors(found.errors) if one.worst > 0]
    assert worst.role == "routed_expert"


def test_blocks_of_rows_do_not_change_weight_errors(tmp_path, monkeypatch):
    converted(tmp_path)
    pair = Pair(opened(tmp_path / "source"), opened(tmp_path / "out"))
    bindings = pair.source.binding, pair.output.binding, pair.source.family
    whole = compare_weights(*bindings, num_jobs=2)
    monkeypatch.setattr("quantkit.evaluate.weights._BLOCK_ELEMENTS", 128 * 128)
    assert compare_weights(*bindings, num_jobs=2) == whole


def test_weights_that_the_output_lacks_are_named(tmp_path):
    source = lively_checkpoint(tmp_path / "source", "glm_moe_dsa", mtp=True)
    convert(source.directory, tmp_path / "out", mtp="drop")
    found = report_of(tmp_path, tmp_path / "source", tmp_path / "out")
    assert found.missing
    assert all(".layers.2." in name for name in found.missing)


def test_scales_of_a_kv_cache_are_named(tmp_path):
    """Of whichever spelling; and no weight is missing for them."""
    source = lively_checkpoint(tmp_path / "source", "glm4_moe")
    for leaf in ("k_scale", "v_scale", "k_proj.k_scale", "v_proj.v_scale"):
        source.put(f"model.layers.1.self_attn.{leaf}", torch.tensor([0.5]))
    source.directory = tmp_path / "scaled"
    source.write()
    found = report_of(tmp_path, tmp_path / "source", tmp_path / "scaled", is_fast=True)
    sizes = {part.role: (part.source_bytes, part.output_bytes) for part in found.sizes}
    assert sizes["kv_scale"] == (0, 16)
    assert "unknown" not in sizes
    assert found.missing == ()


def test_another_model_is_refused_unless_it_is_meant(tmp_path):
    lively_checkpoint(tmp_path / "source", "glm_moe_dsa")
    other = lively_checkpoint(tmp_path / "other", "glm_moe_dsa")
    name = "model.layers.1.input_layernorm.weight"
    other.put(name, other.tensor(name) * 2)
    other.write()
    with pytest.raises(SourceError, match=r"other: is another model than the source.*--allow-other-model"):
        report_of(tmp_path, tmp_path / "source", tmp_path / "other")
    found = report_of(tmp_path, tmp_path / "source", tmp_path / "other", allow_other_model=True)
    assert found.summary.kl.mean.value > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 3}, "has 3 layers, the source has 2"),
        ({"vocab_size": 256}, "has 256 tokens in its vocabulary, the source has 128"),
        ({"hidden_size": 384}, "has 384 channels of hidden states, the source has 256"),
    ],
)
def test_models_of_other_sizes_are_always_refused(tmp_path, changes, words):
    lively_checkpoint(tmp_path / "source", "glm_moe_dsa")
    lively_checkpoint(tmp_path / "other", "glm_moe_dsa", config_changes=changes)
    with pytest.raises(SourceError, match=words):
        report_of(tmp_path, tmp_path / "source", tmp_path / "other", allow_other_model=True)


def test_a_head_of_another_size_than_its_config_is_refused(tmp_path):
    lively_checkpoint(tmp_path / "source", "glm_moe_dsa")
    other = lively_checkpoint(tmp_path / "other", "glm_moe_dsa")
    other.put("lm_head.weight", other.tensor("lm_head.weight")[:100])
    other.write()
    with pytest.raises(SourceError, match=r"other: lm_head\.weight: is \[100, 256\]"):
        report_of(tmp_path, tmp_path / "source", tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.layers.1.mlp.experts.2.down_proj.weight", r"model\.layers\.1: .*not finite at sequence \d, token \d+"),
        ("lm_head.weight", r"lm_head\.weight: its logits are not finite"),
    ],
)
def test_what_is_not_finite_is_named_with_its_checkpoint(tmp_path, name, words):
    lively_checkpoint(tmp_path / "source", "glm_moe_dsa", source_format="bf16")
    other = lively_checkpoint(tmp_path / "other", "glm_moe_dsa", source_format="bf16")
    tensor = other.tensor(name).clone()
    tensor[3] = 3e38  # finite, and no sum of it is
    other.put(name, tensor)
    other.write()
    options = {"work": tmp_path / "work", "allow_other_model": True}
    with pytest.raises(SourceError, match=rf"other: {words}"):
        report_of(tmp_path, tmp_path / "source", tmp_path / "other", **options)
    assert not (tmp_path / "work").exists()


def test_a_directory_for_states_goes_with_them_where_it_was_not_there(tmp_path):
    """However the run ends; one that was there stays, with what lies in it."""
    lively_checkpoint(tmp_path / "source", "glm_moe_dsa")
    work, seen = tmp_path / "new" / "work", []

    def interrupt(_, done):
        seen.append(sorted(path.name[:17] for path in tmp_path.rglob(".quantkit-states-*")))
        if done:
            raise KeyboardInterrupt

    def evaluate_in(work, report_progress):
        pair = Pair(opened(tmp_path / "source"), opened(tmp_path / "source"))
        return make_report(pair, TOKENS, request(tmp_path, work=work, is_fast=True), report_progress=report_progress)

    with pytest.raises(KeyboardInterrupt):
        evaluate_in(work, interrupt)
    assert seen[0] == [".quantkit-states-"]
    assert not (tmp_path / "new").exists()
    evaluate_in(work, lambda _, __: None)
    assert not (tmp_path / "new").exists()
    work.mkdir(parents=True)
    evaluate_in(work, lambda _, __: None)
    assert work.exists()
    (tmp_path / "new" / "file").touch()
    with pytest.raises(UsageError, match="--work"):
        evaluate_in(tmp_path / "new" / "file" / "deeper", lambda _, __: None)


def test_a_weight_that_is_not_finite_is_named(tmp_path):
    lively_checkpoint(tmp_path / "source", "glm_moe_dsa", source_format="bf16")
    other = lively_checkpoint(tmp_path / "other", "glm_moe_dsa", source_format="bf16")
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    tensor = other.tensor(name).clone()
    tensor[3, 5] = torch.nan
    other.put(name, tensor)
    other.write()
    with pytest.raises(SourceError, match=rf"other/model-\S+: {name}: holds nan at row 3, column 5"):
        report_of(tmp_path, tmp_path / "source", tmp_path / "other")


def test_sequences_longer_than_the_model_reads_are_refused(tmp_path):
    lively_checkpoint(tmp_path / "source", "glm_moe_dsa", config_changes={"max_position_embeddings": 16})
    with pytest.raises(UsageError, match="sequences of 24 tokens are longer"):
        report_of(tmp_path, tmp_path / "source", tmp_path / "source")


def test_few_states_are_in_memory_and_many_beside_the_report(tmp_path, monkeypatch):
    converted(tmp_path)
    made = []
    mkdtemp = __import__("tempfile").mkdtemp
    monkeypatch.setattr("tempfile.mkdtemp", lambda **options: made.append(options["dir"]) or mkdtemp(**options))
    report_of(tmp_path, tmp_path / "source", tmp_path / "out", is_fast=True)
    assert made == []
    monkeypatch.setattr("quantkit.evaluate.workplace.MOST_IN_MEMORY", 1000)
    report_of(tmp_path, tmp_path / "source", tmp_path / "out", is_fast=True)
    assert made == [tmp_path]
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def test_bfloat16_stays_near_float32(tmp_path):
    """The divergence of an output is measured to the rounding of activations, which both have."""
    converted(tmp_path)
    exact = quiet(tmp_path / "source", tmp_path / "out").divergence
    pair = Pair(*(opened(tmp_path / name, torch.bfloat16) for name in ("source", "out")))
    rounded = evaluate(pair, TOKENS, work=None).divergence
    np.testing.assert_allclose(rounded.source_nll, exact.source_nll, atol=0.05)
    assert rounded.kl.mean() < 1e-3
