"""Statistics against hooks on transformers' own forward over the whole model."""

import shutil

import numpy as np
import pytest
import torch

from quantkit.calibrate.run import Calibration, calibrate
from quantkit.checkpoint.source import open_checkpoint
from quantkit.errors import SourceError, UsageError
from quantkit.families import family_of
from quantkit.numerics.magnitudes import NUM_BINS, bins_of
from quantkit.statistics.file import open_statistics
from quantkit.streaming import Tokens, open_model
from tests.convert.faults import Faults, die_before, die_in_the_middle, killed
from tests.streaming.models import lively_checkpoint, whole_model
from tests.tiny import EXPERTS

IDS = torch.randint(0, 128, (6, 16), generator=torch.Generator().manual_seed(3))


def streamed(directory):
    checkpoint = open_checkpoint(directory)
    return open_model(checkpoint, family_of(checkpoint.config))


def run(directory, output, **options):
    return calibrate(
        Calibration(model=streamed(directory), tokens=Tokens(ids_NS=IDS.numpy()), output=output, **options)
    )


def seen_by_hooks(tiny, model_type):
    """Inputs of every Linear, and of the experts through their own router, in the whole model."""
    model = whole_model(tiny, model_type)
    inputs, chosen = {}, {}

    def keep(name):
        def hook(_, args):  # what a hook returns would replace the input
            inputs[name] = args[0].reshape(-1, args[0].shape[-1])

        return hook

    def keep_experts(name):
        def hook(module, args):
            chosen[name] = (module, *args)

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(keep(name))
        if name.endswith("mlp.experts"):
            module.register_forward_pre_hook(keep_experts(name))
    with torch.no_grad():
        model(IDS)
    return inputs, chosen


@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "glm4_moe", "kimi_k2"])
def test_moments_are_those_of_the_whole_model(tmp_path, model_type):
    tiny = lively_checkpoint(tmp_path / "source", model_type)
    report = run(tmp_path / "source", tmp_path / "stats.safetensors")
    statistics = open_statistics(tmp_path / "stats.safetensors")
    inputs, chosen = seen_by_hooks(tiny, model_type)
    inputs = {name: value for name, value in inputs.items() if name != "lm_head"}
    assert report.num_linears == len(inputs)
    for name, seen in inputs.items():
        # float32 forward passes that differ in the order of sums
        np.testing.assert_allclose(
            statistics.read(f"{name}.input_second_moment"), seen.double().square().mean(0), rtol=1e-4
        )
        np.testing.assert_allclose(statistics.read(f"{name}.input_absmax"), seen.abs().amax(0), rtol=1e-4)
        assert statistics.read(f"{name}.token_count") == IDS.numel()
    ((name, (module, hidden, indices, _)),) = chosen.items()
    counts = statistics.read(f"{name}.token_count")
    assert counts.tolist() == [(indices == expert).sum().item() for expert in range(EXPERTS)]
    for expert in range(EXPERTS):
        mine = hidden[(indices == expert).any(-1)]
        gate, up = torch.nn.functional.linear(mine, module.gate_up_proj[expert]).chunk(2, -1)
        inner = module.act_fn(gate) * up
        for leaf, seen in (("gate_up_proj", mine), ("down_proj", inner.detach())):
            moments = statistics.read(f"{name}.{leaf}.input_second_moment")[expert]
            np.testing.assert_allclose(moments, seen.double().square().mean(0), rtol=1e-4)
            largest = statistics.read(f"{name}.{leaf}.input_absmax")[expert]
            np.testing.assert_allclose(largest, seen.abs().amax(0), rtol=1e-4)


def test_latent_attention_counts_what_its_cache_holds(tmp_path):
    """transformers' own cache of DeepSeek V3 holds the latent and the rotated part of the key."""
    from transformers import DynamicCache

    tiny = lively_checkpoint(tmp_path / "source", "kimi_k2")
    run(tmp_path / "source", tmp_path / "stats.safetensors")
    statistics = open_statistics(tmp_path / "stats.safetensors")
    model, cache = whole_model(tiny, "kimi_k2"), DynamicCache()
    with torch.no_grad():
        model(IDS, past_key_values=cache, use_cache=True)
    for index, layer in enumerate(cache.layers):
        for part, held in (("latent", layer.keys), ("rope", layer.values)):
            name = f"model.layers.{index}.self_attn.{part}"
            assert_counts(statistics, name, held.reshape(1, -1))


def test_grouped_heads_are_counted_apart(tmp_path):
    from transformers import DynamicCache

    tiny = lively_checkpoint(tmp_path / "source", "glm4_moe")
    run(tmp_path / "source", tmp_path / "stats.safetensors")
    statistics = open_statistics(tmp_path / "stats.safetensors")
    model, cache = whole_model(tiny, "glm4_moe"), DynamicCache()
    with torch.no_grad():
        model(IDS, past_key_values=cache, use_cache=True)
    for index, layer in enumerate(cache.layers):
        for part, held in (("k", layer.keys), ("v", layer.values)):
            rows = held.transpose(0, 1).reshape(held.shape[1], -1)
            assert_counts(statistics, f"model.layers.{index}.self_attn.{part}", rows)


def test_quantiles_that_are_told_are_not_above_the_largest(tmp_path):
    """A quantile is the upper edge of its bin, and the largest value may lie below that."""
    lively_checkpoint(tmp_path / "source", "kimi_k2")
    report = run(tmp_path / "source", tmp_path / "stats.safetensors")
    assert len(report.cache) == 4
    for one in report.cache:
        assert 0 < one.quantiles[0] <= one.quantiles[-1] <= one.largest


def assert_counts(statistics, name, rows):
    histogram = statistics.read(f"{name}_histogram")
    expected = np.stack([np.bincount(bins_of(row.numpy()), minlength=NUM_BINS) for row in rows])
    assert histogram.shape == expected.shape
    # a value beside an edge may fall on its other side
    assert np.abs(histogram - expected).sum() <= 0.002 * expected.sum()
    assert histogram.sum() == expected.sum()
    np.testing.assert_allclose(statistics.read(f"{name}_absmax"), rows.abs().amax(1), rtol=1e-4)


def test_an_interrupted_run_goes_on_and_gives_the_same_bytes(tmp_path):
    lively_checkpoint(tmp_path / "source", "glm_moe_dsa")
    (tmp_path / "whole.safetensors.draft").write_text("precious")
    run(tmp_path / "source", tmp_path / "whole.safetensors")
    assert (tmp_path / "whole.safetensors.draft").read_text() == "precious"  # of somebody else

    class StopError(Exception):
        pass

    def stop(stage, done):
        if done:
            raise StopError

    with pytest.raises(StopError):
        run(tmp_path / "source", tmp_path / "stats.safetensors", report_progress=stop)
    assert not (tmp_path / "stats.safetensors").exists()
    stages = []
    run(
        tmp_path / "source",
        tmp_path / "stats.safetensors",
        report_progress=lambda stage, done: stages.append((stage.earlier_bytes, done)),
    )
    assert stages[0][0] > 0  # the first layer was not run again
    assert len(stages) == 2
    assert (tmp_path / "stats.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert not (tmp_path / "stats.safetensors.partial").exists()


@pytest.mark.parametrize("name", ["layer-00000.safetensors", "states/states-1.bin"])
def test_what_was_damaged_behind_a_kill_is_made_again(tmp_path, name):
    lively_checkpoint(tmp_path / "source", "glm_moe_dsa")
    run(tmp_path / "source", tmp_path / "whole.safetensors")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "source", tmp_path / "stats.safetensors", report_progress=interrupt)
    path = tmp_path / "stats.safetensors.partial" / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    run(tmp_path / "source", tmp_path / "stats.safetensors")
    assert (tmp_path / "stats.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def interrupt(_, done):
    """As soon as a layer is done."""
    if done:
        raise KeyboardInterrupt


def test_a_second_run_is_refused_while_the_first_one_works(tmp_path):
    lively_checkpoint(tmp_path / "source", "glm_moe_dsa")
    output, refused = tmp_path / "stats.safetensors", []

    def meanwhile(_, done):
        with pytest.raises(UsageError, match="is being written by another run"):
            run(tmp_path / "source", output, resume=bool(refused))
        refused.append(done)

    run(tmp_path / "source", output, report_progress=meanwhile)
    run(tmp_path / "source", tmp_path / "alone.safetensors")
    assert len(refused) == 3
    assert output.read_bytes() == (tmp_path / "alone.safetensors").read_bytes()


def test_an_interrupted_run_does_not_go_on_with_another_source(tmp_path):
    """Of the same norms: a fingerprint does not tell the two apart."""
    tiny = lively_checkpoint(tmp_path / "source", "glm_moe_dsa")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "source", tmp_path / "stats.safetensors", report_progress=interrupt)
    name = "model.layers.1.mlp.shared_experts.up_proj.weight"
    tiny.put(name, tiny.tensor(name).roll(1, 0))
    tiny.write()
    with pytest.raises(UsageError, match=r"a run that differs: source\.model-0"):
        run(tmp_path / "source", tmp_path / "stats.safetensors")


def test_an_interrupted_run_of_other_tokens_is_refused(tmp_path):
    lively_checkpoint(tmp_path / "source", "glm_moe_dsa")
    (tmp_path / "stats.safetensors.partial").mkdir()
    (tmp_path / "stats.safetensors.partial" / "mine").touch()
    with pytest.raises(UsageError, match="not ours"):
        run(tmp_path / "source", tmp_path / "stats.safetensors")
    (tmp_path / "stats.safetensors.partial" / "mine").unlink()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "source", tmp_path / "stats.safetensors", report_progress=interrupt)
    few = Tokens(ids_NS=IDS[:2].numpy())
    with pytest.raises(UsageError, match=r"tokens was .6 x 16, sha256 \w{12}. and is .2 x 16, sha256 \w{12}."):
        calibrate(Calibration(model=streamed(tmp_path / "source"), tokens=few, output=tmp_path / "stats.safetensors"))
    run(tmp_path / "source", tmp_path / "stats.safetensors", resume=False)
    assert (tmp_path / "stats.safetensors").is_file()


def test_a_kill_behind_the_rename_leaves_nothing_that_the_next_run_does_not_remove(tmp_path):
    """At every change from the rename of the file on; the layers are done before, so that no child computes."""
    lively_checkpoint(tmp_path / "source", "glm_moe_dsa")
    output, done = tmp_path / "done" / "stats.safetensors", []
    output.parent.mkdir()

    def stop_behind_the_last(stage, num_bytes):
        done.append(num_bytes)
        if sum(done) == stage.total_bytes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "source", output, report_progress=stop_behind_the_last)
    model = streamed(tmp_path / "source")

    def work(root):
        calibration = Calibration(model=model, tokens=Tokens(ids_NS=IDS.numpy()), output=root / output.name)
        return calibrate(calibration)

    def prepared(name):
        shutil.copytree(output.parent, tmp_path / name)
        return tmp_path / name

    faults = Faults(prepared("whole"), removals=True)
    with faults.injected(die_before, -1):
        work(faults.root)
    renamed = next(at for at, call in enumerate(faults.calls) if call.startswith("replace"))
    assert len(faults.calls) - renamed > 5
    whole = (faults.root / output.name).read_bytes()
    for at in range(renamed - 1, len(faults.calls)):
        root = prepared(f"kill-{at}")
        assert killed(lambda: work(root), Faults(root, removals=True), die_in_the_middle, at)  # noqa: B023
        if (root / output.name).exists():
            with pytest.raises(UsageError, match="exists already"):
                work(root)
        else:
            assert at < renamed
            work(root)
        assert [path.name for path in root.iterdir()] == [output.name]
        assert (root / output.name).read_bytes() == whole


def test_work_of_another_run_beside_a_file_is_left_alone(tmp_path):
    """Somebody has put the file there meanwhile: of other tokens, or none of ours."""
    lively_checkpoint(tmp_path / "source", "glm_moe_dsa")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "source", tmp_path / "stats.safetensors", report_progress=interrupt)
    few = Tokens(ids_NS=IDS[:2].numpy())
    calibrate(Calibration(model=streamed(tmp_path / "source"), tokens=few, output=tmp_path / "few.safetensors"))
    for content in ((tmp_path / "few.safetensors").read_bytes(), b"mine"):
        (tmp_path / "stats.safetensors").write_bytes(content)
        with pytest.raises(UsageError, match="exists already"):
            run(tmp_path / "source", tmp_path / "stats.safetensors")
        assert (tmp_path / "stats.safetensors.partial" / "layer-00000.safetensors").exists()


def test_a_run_that_finishes_no_layer_leaves_nothing(tmp_path):
    tiny = lively_checkpoint(tmp_path / "source", "glm_moe_dsa", source_format="bf16")
    name = "model.layers.0.mlp.up_proj.weight"
    tensor = tiny.tensor(name).clone()
    tensor[3, 5] = torch.nan
    tiny.put(name, tensor)
    tiny.write()
    with pytest.raises(SourceError, match="holds nan"):
        run(tmp_path / "source", tmp_path / "new" / "stats.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("model.layers.1.self_attn.q_a_proj.weight", None, "is missing"),
        ("model.layers.1.mlp.experts.2.down_proj.weight", None, "is missing"),
        ("model.layers.1.mlp.experts.2.down_proj.weight", (128, 256), r"is \[128, 256\], transformers expects"),
        ("model.norm.weight", (7,), r"is \[7\], transformers expects \[256\]"),
        ("model.embed_tokens.weight", (128, 128), r"is \[128, 128\], transformers expects \[128, 256\]"),
        ("lm_head.weight", None, "is missing"),
    ],
)
def test_what_headers_tell_is_told_before_anything_is_made(tmp_path, monkeypatch, name, shape, words):
    tiny = lively_checkpoint(tmp_path / "source", "glm_moe_dsa", source_format="bf16")
    tiny.remove(name)
    if shape is not None:
        tiny.put(name, torch.zeros(shape, dtype=torch.bfloat16))
    tiny.write()
    monkeypatch.setattr("quantkit.calibrate.run.run_directory", lambda *_, **__: pytest.fail("it has begun"))
    with pytest.raises(SourceError, match=f"{name}: {words}"):
        run(tmp_path / "source", tmp_path / "stats.safetensors")


def test_sequences_longer_than_the_model_reads_are_refused(tmp_path):
    lively_checkpoint(tmp_path / "source", "glm_moe_dsa", config_changes={"max_position_embeddings": 8})
    with pytest.raises(UsageError, match="sequences of 16 tokens are longer"):
        run(tmp_path / "source", tmp_path / "stats.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_hidden_state_that_is_not_finite_is_named(tmp_path):
    tiny = lively_checkpoint(tmp_path / "source", "glm4_moe")
    for leaf in ("up_proj", "down_proj"):
        name = f"model.layers.1.mlp.shared_experts.{leaf}.weight_scale_inv"
        tiny.put(name, tiny.tensor(name) * 1e35)
    tiny.write()
    with pytest.raises(SourceError, match=r"model\.layers\.1: its output is not finite at sequence 0, token 0"):
        run(tmp_path / "source", tmp_path / "stats.safetensors")


def test_moments_beyond_fp32_are_named(tmp_path):
    """Finite inputs whose squares are not."""
    tiny = lively_checkpoint(tmp_path / "source", "glm4_moe")
    name = "model.layers.1.mlp.shared_experts.up_proj.weight_scale_inv"
    tiny.put(name, tiny.tensor(name) * 1e24)
    tiny.write()
    with pytest.raises(SourceError, match=r"shared_experts\.down_proj\.input_second_moment: is not finite"):
        run(tmp_path / "source", tmp_path / "stats.safetensors")


def test_unvisited_experts_are_named(tmp_path):
    tiny = lively_checkpoint(tmp_path / "source", "glm_moe_dsa")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = torch.zeros(EXPERTS)
    bias[2] = -100
    tiny.put(name, bias)
    tiny.write()
    report = run(tmp_path / "source", tmp_path / "stats.safetensors")
    assert [one.unvisited for one in report.experts] == [(2,)]
    moments = open_statistics(tmp_path / "stats.safetensors").read(
        "model.layers.1.mlp.experts.down_proj.input_second_moment"
    )
    assert not moments[2].any()
    assert moments[1].all()
