"""Conversion weighted by second moments: the right numbers reach the right weight, by every way the same bytes."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from quantkit.checkpoint.source import open_checkpoint
from quantkit.convert import local
from quantkit.convert.conversion import Conversion
from quantkit.convert.convert import convert_checkpoint
from quantkit.convert.local import Share, execute
from quantkit.convert.publish import already_made
from quantkit.convert.ranks import convert_share, finalize
from quantkit.errors import RecipeError, SourceError, UsageError
from quantkit.importance.cover import Cover
from quantkit.importance.open import open_importance
from quantkit.numerics import grid, search
from quantkit.numerics.packing import pack_int4, unpack_int4
from quantkit.plan.importance import with_importance
from quantkit.plan.make import make_plan
from quantkit.recipe import override
from quantkit.sources import resolve_source
from quantkit.transcode import kernels
from quantkit.verify.verify import verify_output
from tests.cli.test_commands import document, run
from tests.convert.helpers import convert, directory_bytes, load_output
from tests.convert.plans import fingerprint
from tests.importance.files import LAYER, TOKENS, expert_entries, write_dat, write_gguf, write_statistics

PRIOR = 32
ONE_BY_ONE = 1 << 10  # bytes of a task: a row or few


def write(kind, path, entries, source):
    if kind == "statistics":
        return write_statistics(path, entries, model=fingerprint(source))
    return {"imatrix.gguf": write_gguf, "imatrix.dat": write_dat}[kind](path, entries)


def plan_with(source, path, **changes):
    resolved = resolve_source(str(source))
    plan = make_plan(override(resolved.recipe, **changes), resolved.family, resolved.checkpoint)
    return with_importance(plan, open_importance(path))


def share(row):
    total = 0.0
    for value in row.tolist():
        total += value
    return row / total


def expected_shapes(moments, tokens, kind):
    """The documented formula, an expert after the other."""
    rows = moments.astype(np.float64)
    if kind == "imatrix.gguf":  # which holds sums, in FP32
        rows = (moments * np.array(tokens, np.float32)[:, None]).astype(np.float64)
    if kind == "imatrix.dat":  # which tells no tokens
        calls = np.float32(-(-max(tokens) // 512))
        rows = (moments * calls).astype(np.float64)
        tokens = [int(count > 0) for count in tokens]
    layer = np.zeros(rows.shape[1])
    for row, count in zip(rows, tokens, strict=True):
        if count:
            layer = layer + count * share(row)
    layer = layer / sum(tokens)
    if kind == "imatrix.dat":
        return [share(row) if count else layer for row, count in zip(rows, tokens, strict=True)]
    return [
        (count * share(row) + PRIOR * layer) / (count + PRIOR) if count else layer
        for row, count in zip(rows, tokens, strict=True)
    ]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["imatrix.gguf", "imatrix.dat", "statistics"])
def test_every_expert_is_searched_with_its_own_moments(kind, fused, tiny_checkpoint, tmp_path):
    """The specification of the search on what the documented formula makes of the file; a token or none included."""
    source = tiny_checkpoint(source_format="bf16", fused_experts=fused)
    entries = expert_entries()
    convert(source.directory, tmp_path / "out", importance=write(kind, tmp_path / "file", entries, source.directory))
    made = load_output(tmp_path / "out")
    for leaf in ("gate", "up", "down"):
        shapes = expected_shapes(*entries[f"blk.1.ffn_{leaf}_exps"], kind)
        for expert, shape in enumerate(shapes):
            module = f"{LAYER}.{expert}.{leaf}_proj"
            levels = search.importance_levels(shape, group_size=32)
            ints, unit = grid.value_grid(source.decoded[f"{module}.weight"].numpy(), group_size=32)
            codes, scale = search.quantize_search(ints, unit, group_size=32, signed=True, importance_C=levels)
            assert np.array_equal(made[f"{module}.weight_packed"].numpy(), pack_int4(codes)), module
            assert np.array_equal(made[f"{module}.weight_scale"].view(torch.uint16).numpy(), scale), module
    report = verify_output(tmp_path / "out", source=open_checkpoint(source.directory))
    assert report.is_good, report.first_error()


@pytest.mark.parametrize("fused", [False, True])
def test_moments_of_two_experts_changed_over_change_these_two(fused, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(fused_experts=fused).directory
    entries = expert_entries([900, 800, 700, 600])
    changed = {name: (moments[[1, 0, 2, 3]], tokens) for name, (moments, tokens) in entries.items()}
    convert(source, tmp_path / "first", importance=write_dat(tmp_path / "first.dat", entries))
    convert(source, tmp_path / "second", importance=write_dat(tmp_path / "second.dat", changed))
    first, second = load_output(tmp_path / "first"), load_output(tmp_path / "second")
    different = {name for name in first if not torch.equal(first[name], second[name])}
    assert {re.sub(r"\.weight_.*", "", name) for name in different} == {
        f"{LAYER}.{expert}.{leaf}_proj" for expert in (0, 1) for leaf in ("gate", "up", "down")
    }


def test_fused_and_single_experts_give_the_same_tensors(tiny_checkpoint, tmp_path):
    path = write_gguf(tmp_path / "x.gguf", expert_entries())
    outputs = []
    for fused in (False, True):
        source = tiny_checkpoint(f"source{fused}", fused_experts=fused).directory
        convert(source, tmp_path / f"out{fused}", importance=path)
        outputs.append(load_output(tmp_path / f"out{fused}"))
    assert outputs[0].keys() == outputs[1].keys()
    assert all(torch.equal(outputs[0][name], outputs[1][name]) for name in outputs[0])


@pytest.mark.parametrize("form", ["fp8_block", "fp8_channel", "bf16", "f16"])
@pytest.mark.parametrize("changes", [{}, {"signed_scales": False}, {"zero_points": True, "group_size": 64}])
def test_the_same_bytes_by_every_way(form, changes, tiny_checkpoint, tmp_path, monkeypatch):
    """Threads, row blocks, the composition in plain numpy, and ranks."""
    source = tiny_checkpoint(source_format=form, num_shards=3).directory
    path = write_gguf(tmp_path / "x.gguf", expert_entries())
    convert(source, tmp_path / "golden", importance=path, num_jobs=1, **changes)
    golden = directory_bytes(tmp_path / "golden")
    plain = tmp_path / "plain"
    convert(source, plain, **changes)
    assert directory_bytes(plain) != golden
    convert(source, tmp_path / "five", importance=path, num_jobs=5, **changes)
    assert directory_bytes(tmp_path / "five") == golden
    plan = plan_with(source, path, **changes)
    for rank in (1, 0):
        convert_share(Conversion(plan=plan, target=tmp_path / "ranks", num_jobs=1, rank=rank, world_size=2))
    finalize(Conversion(plan=plan, target=tmp_path / "ranks", num_jobs=1))
    assert directory_bytes(tmp_path / "ranks") == golden
    results = []
    for task_bytes in (ONE_BY_ONE, 5 << 10, 1 << 24):
        directory = tmp_path / str(task_bytes)
        directory.mkdir()
        execution = execute(plan, Share(directory=directory), num_jobs=2, task_bytes=task_bytes)
        results.append((directory_bytes(directory), execution.errors, execution.gains))
    assert results[0] == results[1] == results[2]
    monkeypatch.setattr(kernels, "FUSED_CPU", {})
    convert(source, tmp_path / "composed", importance=path, **changes)
    assert directory_bytes(tmp_path / "composed") == golden


def test_the_file_may_lie_anywhere_and_be_called_anything(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    path = write_gguf(tmp_path / "x.gguf", expert_entries())
    convert(source, tmp_path / "golden", importance=path)
    (tmp_path / "else").mkdir()
    path.rename(tmp_path / "else" / "another name")
    convert(source, tmp_path / "out", importance=tmp_path / "else" / "another name")
    assert directory_bytes(tmp_path / "out") == directory_bytes(tmp_path / "golden")


def test_coverage_is_told_everywhere(tiny_checkpoint, tmp_path):
    """Own, rare, by the layer, none (the draft, which the file does not know), and what is of no weight."""
    source = tiny_checkpoint(mtp=True).directory
    dense = (np.ones(256, np.float32), [941])
    path = write_gguf(tmp_path / "x.gguf", expert_entries() | {"blk.1.attn_q_a": dense, "blk.7.attn_output": dense})
    plan = document(run("plan", source, "--importance", path, "--json"), "plan")
    told = plan["importance"]
    assert told["weights"] == {"routed_expert": {"own": 3, "rare": 6, "layer": 3, "none": 12}}
    draft = "model.layers.2.mlp.experts.*"
    assert told["missing"] == {f"{draft}.{leaf}_proj": 4 for leaf in ("gate", "up", "down")}
    assert (told["num_unused"], told["unused"]) == (1, ["blk.7.attn_output"])
    text = run("plan", source, "--importance", path, "--summary", tmp_path / "plan.md")
    assert f"no moments: {draft}.down_proj: 4" in text.stderr
    assert "9 of 24 weights saw fewer than 32 tokens" in text.stderr

    result = run("convert", source, "--importance", path, "-o", tmp_path / "out", "--json")
    assert result.returncode == 0, result.stderr
    converted = document(result, "convert")["importance"]
    assert {key: converted[key] for key in told} == told
    manifest = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert manifest["importance"] == converted
    assert str(tmp_path) not in (tmp_path / "out" / "conversion.json").read_text()
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"(imatrix.gguf, made of `calibration.txt, more.txt`, sha256 `{told['sha256']}`)" in card
    assert "3 weights by their own, 6 with few tokens and 3 with none by those of their layer, 12 without" in card
    assert card == run("card", tmp_path / "out").stdout
    shown = run(
        "convert", source, "--importance", path, "-o", tmp_path / "again", "-q", "--summary", tmp_path / "convert.md"
    )
    assert re.search(r"routed_expert +3 +6 +3 +12\n", shown.stdout)
    assert "Relative error as inputs see it, of the first 16 rows" in shown.stdout
    gain = converted["errors"]["routed_expert"]
    assert gain["num_weights"] == 12
    assert gain["relative_error"] < 0.95 * gain["without_importance"]

    summaries = {name: (tmp_path / f"{name}.md").read_text() for name in ("plan", "convert")}
    for summary in summaries.values():
        assert "\nImportance: imatrix.gguf\n\n| part | moments of its own | few tokens |" in summary
        assert "\n| routed_expert | 3 | 6 | 3 | 12 |\n" in summary
        assert "\nNo moments:\n\n- model.layers.2.mlp.experts.&#42;." in summary
        assert "&#42;.gate_proj: 4\n" in summary
    columns = shown.stdout.partition("as inputs see it")[2].splitlines()[2].split()
    assert columns == ["routed_expert", "12", f"{gain['relative_error']:.4f}", f"{gain['without_importance']:.4f}"]
    assert "\nRelative error as inputs see it, of the first 16 rows\n\n| part | weights |" in summaries["convert"]
    assert f"\n| {' | '.join(columns)} |\n" in summaries["convert"]


@pytest.mark.parametrize("kind", ["statistics", "imatrix.gguf"])
def test_moments_that_are_all_zero_cover_nothing(kind, tiny_checkpoint, tmp_path):
    """Whatever tokens are counted for them."""
    source, entries = tiny_checkpoint().directory, expert_entries([900, 900, 900, 900])
    for moments, _ in entries.values():
        moments[1] = 0
    importance = plan_with(source, write(kind, tmp_path / "one", entries, source)).importance
    assert (importance.count(Cover.OWN), importance.count(Cover.LAYER)) == (9, 3)
    entries["blk.1.ffn_down_exps"][0][:] = 0
    plan = plan_with(source, write(kind, tmp_path / "down", entries, source))
    assert (plan.importance.count(Cover.OWN), plan.importance.count(Cover.NONE)) == (6, 4)
    assert any(
        "4 of 12 weights have no moments (model.layers.1.mlp.experts.*.down_proj)" in one for one in plan.warnings
    )
    entries["blk.1.ffn_gate_exps"][0][:] = 0
    with pytest.raises(SourceError, match="covers none of the 12 weights"):
        plan_with(source, write(kind, tmp_path / "all", entries, source))


def test_the_weighed_error_is_what_it_says(tiny_checkpoint, tmp_path):
    """Of the one weight that is quantized, a Linear that sees every token, from the output's own words."""
    source = tiny_checkpoint(source_format="bf16")
    name, moments = "model.layers.0.self_attn.o_proj", np.exp(np.random.default_rng(2).normal(size=128))
    path = write_gguf(tmp_path / "x.gguf", {"blk.0.attn_output": (moments.astype(np.float32), [3])})
    report = convert(source.directory, tmp_path / "out", importance=path, targets=[name])
    (gain,) = report.gains
    assert (gain.role, gain.num_weights) == ("attention", 1)
    convert(source.directory, tmp_path / "plain", targets=[name])
    values = source.decoded[f"{name}.weight"].numpy()[:16].astype(np.float64)
    for directory, found in (("out", gain.relative), ("plain", gain.plain)):
        made = load_output(tmp_path / directory)
        scale = made[f"{name}.weight_scale"][:16].float().numpy().repeat(32, axis=1)
        error = values - unpack_int4(made[f"{name}.weight_packed"].numpy()[:16], 128) * scale
        weighed = np.sqrt((error**2 * moments).sum() / (values**2 * moments).sum())
        assert found == pytest.approx(weighed, rel=1e-6)  # moments went through FP32
    assert gain.relative < gain.plain


def test_a_search_by_skewed_moments_passes_its_threshold_and_damage_does_not(tiny_checkpoint, tmp_path):
    """One channel of each group has everything: more plain error than any threshold without importance is made for."""
    source = tiny_checkpoint(source_format="bf16").directory
    entries = expert_entries([900] * 4)
    for moments, _ in entries.values():
        moments[:] = np.where(np.arange(moments.shape[1]) % 32 == 3, 1, 1e-9)
    report = convert(source, tmp_path / "out", importance=write_gguf(tmp_path / "x.gguf", entries))
    assert 0.10 < report.classes[0].relative < 0.16
    assert report.gains[0].relative < 0.5 * report.gains[0].plain
    checked = verify_output(tmp_path / "out", source=open_checkpoint(source))
    assert checked.is_good, checked.first_error()
    from quantkit.integrity.weight_errors import WeightError
    from quantkit.verify.thresholds import check_errors

    for relative, is_bad in ((0.21, False), (0.23, True)):
        error = WeightError(name="x", role="routed_expert", error2=relative**2, weight2=1.0)
        plain = list(check_errors([error], report.classes, report.plan.recipe))
        weighted = list(check_errors([error], report.classes, report.plan.recipe, has_importance=True))
        assert plain[0].is_error
        assert any(finding.is_error for finding in weighted) == is_bad


def test_a_run_goes_on_only_with_the_same_file(tiny_checkpoint, tmp_path, monkeypatch):
    source = tiny_checkpoint(num_shards=4).directory
    path = write_gguf(tmp_path / "x.gguf", expert_entries())
    make, most, made = local.run_task, 10_000, []

    def die(task, *others):
        if len(made) == most:
            raise KeyboardInterrupt
        made.append(task)
        return make(task, *others)

    monkeypatch.setattr(local, "run_task", die)
    convert(source, tmp_path / "golden", importance=path, num_jobs=1)
    golden = directory_bytes(tmp_path / "golden")
    most = len(made) - 2
    made.clear()
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", importance=path, num_jobs=1)
    monkeypatch.setattr(local, "run_task", make)
    assert (tmp_path / "out.partial").exists()
    other = write_gguf(tmp_path / "y.gguf", expert_entries(seed=4))
    hashes = [open_importance(one).sha256 for one in (path, other)]
    with pytest.raises(UsageError, match=rf'importance\.sha256 was "{hashes[0]}" and is "{hashes[1]}"'):
        convert(source, tmp_path / "out", importance=other)
    with pytest.raises(UsageError, match=r"importance was .* and is null"):
        convert(source, tmp_path / "out")
    report = convert(source, tmp_path / "out", importance=path)
    assert report.earlier_bytes > 0
    assert directory_bytes(tmp_path / "out") == golden

    complete = Conversion(plan=plan_with(source, path), target=tmp_path / "out", num_jobs=1)
    found = already_made(complete)
    assert found is not None
    assert found.gains == report.gains
    with pytest.raises(UsageError, match="made with another importance file"):
        already_made(replace(complete, plan=plan_with(source, other)))
    with pytest.raises(UsageError, match="made with another importance file"):
        already_made(replace(complete, plan=replace(complete.plan, importance=None)))


def test_another_file_in_its_place_is_noticed(tiny_checkpoint, tmp_path, monkeypatch):
    """Before the work, where a plan came from elsewhere, and behind each shard."""
    source = tiny_checkpoint().directory
    path = write_gguf(tmp_path / "x.gguf", expert_entries())
    plan = plan_with(source, path)
    write_gguf(path, expert_entries(seed=4))
    with pytest.raises(SourceError, match="is another file than the plan was made with"):
        convert_checkpoint(Conversion(plan=plan, target=tmp_path / "out", num_jobs=1))
    write_gguf(path, expert_entries())  # the same bytes, at another time
    convert_checkpoint(Conversion(plan=plan, target=tmp_path / "out", num_jobs=1))
    path.unlink()
    with pytest.raises(SourceError, match="every machine needs it"):
        convert_checkpoint(Conversion(plan=plan, target=tmp_path / "other", num_jobs=1))
    write_gguf(path, expert_entries())
    make = local.run_task

    def meddle(*arguments):
        path.touch()
        return make(*arguments)

    monkeypatch.setattr(local, "run_task", meddle)
    with pytest.raises(SourceError, match="has changed while it was read"):
        convert(source, tmp_path / "other", importance=path)


def test_what_has_no_use_for_importance_is_refused(tiny_checkpoint, tmp_path):
    path = write_gguf(tmp_path / "x.gguf", expert_entries())
    source = tiny_checkpoint().directory
    with pytest.raises(RecipeError, match="weights the search of scales"):
        plan_with(source, path, scales="absmax")
    with pytest.raises(RecipeError, match="--method gptq gathers moments of its own"):
        plan_with(source, path, method="gptq")
    refused = run("convert", source, "--scales", "absmax", "--importance", path, "-o", tmp_path / "out")
    assert refused.returncode == 2
    native = tiny_checkpoint("native", model_type="kimi_k2", source_format="int4_native").directory
    with pytest.raises(RecipeError, match="nothing becomes INT4"):
        plan_with(native, path)


def test_a_file_of_another_model_is_refused(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    entries = expert_entries()
    path = write_statistics(tmp_path / "s.safetensors", entries, model="0" * 64)
    with pytest.raises(SourceError, match="another model or revision"):
        plan_with(source, path)
    moved = {name.replace("blk.1", "blk.4"): one for name, one in entries.items()}
    with pytest.raises(SourceError, match="covers none of the 12 weights"):
        plan_with(source, write_gguf(tmp_path / "x.gguf", moved))
    for moments, tokens in (
        (np.ones((4, 64), np.float32), TOKENS),
        (np.ones((8, 128), np.float32), [5] * 8),
        (np.ones((3, 128), np.float32), [5] * 3),
        (np.ones((2, 256), np.float32), [5, 5]),
    ):
        other = write_gguf(tmp_path / "y.gguf", entries | {"blk.1.ffn_down_exps": (moments, tokens)})
        with pytest.raises(SourceError, match="needs 4 x 128") as caught:
            plan_with(source, other)
        assert caught.value.tensor == "blk.1.ffn_down_exps.weight.in_sum2"
    turned = np.ones((128, 4), np.float32)  # with one count for all, as files that were made of older ones have it
    changes = {
        "blk.1.ffn_down_exps.weight.in_sum2": turned,
        "blk.1.ffn_down_exps.weight.counts": np.ones(1, np.float32),
    }
    with pytest.raises(SourceError, match=r"holds 128 x 4 moments with 1 counts, but .* needs 4 x 128"):
        plan_with(source, write_gguf(tmp_path / "y.gguf", entries, changes=changes))


def test_statistics_of_a_source_whose_weights_are_elsewhere_are_taken_with_a_warning(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    path = write_statistics(tmp_path / "s.safetensors", expert_entries(), model="0" * 64)
    result = run("plan", "--config", source.directory / "config.json", "--importance", path)
    assert result.returncode == 0, result.stderr
    assert "whether s.safetensors is of this very model is not known" in result.stderr


def test_bad_numbers_end_a_conversion_with_their_name(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    entries = expert_entries()
    entries["blk.1.ffn_up_exps"] = (entries["blk.1.ffn_up_exps"][0].copy(), TOKENS)
    entries["blk.1.ffn_up_exps"][0][1, 7] = np.nan
    path = write_gguf(tmp_path / "x.gguf", entries)
    failed = run("convert", source, "--importance", path, "-o", tmp_path / "out", "-q")
    assert failed.returncode == 3
    assert "blk.1.ffn_up_exps.weight.in_sum2: holds NaN, Inf or less than 0 in row 1" in failed.stderr
    assert not (tmp_path / "out").exists()


def test_gate_speaks_for_up_where_that_is_missing(tiny_checkpoint, tmp_path):
    """They have one input; merged experts (ffn_gate_up_exps) have one entry for both."""
    source = tiny_checkpoint().directory
    entries = expert_entries()
    convert(source, tmp_path / "golden", importance=write_gguf(tmp_path / "x.gguf", entries))
    for name in ("blk.1.ffn_gate_exps", "blk.1.ffn_gate_up_exps", "blk.1.ffn_up_exps"):
        few = {name: entries["blk.1.ffn_up_exps"], "blk.1.ffn_down_exps": entries["blk.1.ffn_down_exps"]}
        convert(source, tmp_path / name, importance=write_gguf(tmp_path / "y.gguf", few))
        first, second = load_output(tmp_path / name), load_output(tmp_path / "golden")
        assert all(torch.equal(first[one], second[one]) for one in second)


def test_w4afp8_takes_importance(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    path = write_gguf(tmp_path / "x.gguf", expert_entries())
    convert(source, tmp_path / "out", importance=path, layout="w4afp8")
    report = verify_output(tmp_path / "out", source=open_checkpoint(source))
    assert report.is_good, report.first_error()
    convert(source, tmp_path / "plain", layout="w4afp8")
    first, second = load_output(tmp_path / "out"), load_output(tmp_path / "plain")
    different = {
        name for name in first if not torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8))
    }
    assert different
    assert all(".mlp.experts." in name for name in different)
