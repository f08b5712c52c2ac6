"""Streaming a checkpoint gives what transformers' own forward gives over the whole model."""

from dataclasses import replace

import pytest
import torch

from quantkit.calibrated.compressor import check_architecture
from quantkit.checkpoint.source import open_checkpoint
from quantkit.errors import ResourceError, SourceError
from quantkit.families import family_of
from quantkit.hidden_states import state_bytes
from quantkit.streaming import StreamedLayer, architectures, open_model, open_states
from quantkit.streaming import layer as layer_module
from quantkit.streaming import model as model_module
from tests.streaming.models import CLASSES, lively_checkpoint, whole_model
from tests.tiny import write_checkpoint

IDS = torch.randint(0, 128, (5, 24), generator=torch.Generator().manual_seed(0))


def opened(directory, dtype=torch.float32):
    checkpoint = open_checkpoint(directory)
    return open_model(checkpoint, family_of(checkpoint.config), dtype=dtype)


def streamed_logits(directory, ids=IDS, *, work=None, dtype=torch.float32):
    model = opened(directory, dtype)
    states = open_states(*ids.shape, model.hidden_size, dtype=dtype, directory=work)
    states.hidden[:] = model.embed(ids.reshape(-1))
    for index in range(model.num_layers):
        model.layer(index).run(states)
    return model.logits(states.hidden).view(*ids.shape, -1)


def assert_equal_logits(expected, got, *, rel_rms):
    error = (expected - got).pow(2).mean().sqrt() / expected.std()
    assert error < rel_rms, f"{error} is above {rel_rms}"
    assert expected.std() > 0.01  # it says something


@pytest.mark.parametrize("model_type", sorted(CLASSES))
def test_logits_equal_those_of_the_whole_model(tmp_path, model_type):
    tiny = lively_checkpoint(tmp_path / "source", model_type)
    with torch.no_grad():
        expected = whole_model(tiny, model_type)(IDS).logits
    # float32 sums in another order: a few steps of 2**-24 a layer
    assert_equal_logits(expected, streamed_logits(tmp_path / "source"), rel_rms=2e-5)


def test_bfloat16_differs_by_its_rounding(tmp_path):
    tiny = lively_checkpoint(tmp_path / "source", "glm_moe_dsa")
    with torch.no_grad():
        exact = whole_model(tiny, "glm_moe_dsa")(IDS).logits
        expected = whole_model(tiny, "glm_moe_dsa", torch.bfloat16)(IDS).logits.float()
    got = streamed_logits(tmp_path / "source", dtype=torch.bfloat16)
    rounding = ((expected - exact).pow(2).mean().sqrt() / exact.std()).item()
    # both round at each step, in another order: as far from each other as each is from the exact logits
    assert_equal_logits(expected, got, rel_rms=2 * rounding)
    assert_equal_logits(exact, got, rel_rms=2 * rounding)


def test_bytes_of_layers_are_those_of_their_weights(tmp_path):
    tiny = lively_checkpoint(tmp_path / "source", "glm_moe_dsa")
    plain = opened(tiny.directory).layer_bytes()
    stored = [
        sum(one.nbytes for shard in tiny.shards.values() for name, one in shard.items() if f".{layer}." in name)
        for layer in ("layers.0", "layers.1")
    ]
    assert plain == stored
    tiny.put("model.layers.01.extra", torch.zeros(3))
    for name in ("model.layers.\u00b2.extra", "model.layers.99.extra", "vision.layers.0.extra", "model.sub_layers.0.x"):
        tiny.put(name, torch.zeros(1))
    tiny.write()
    assert opened(tiny.directory).layer_bytes() == [plain[0], plain[1] + 12]


def test_layers_that_share_an_indexer_get_its_choice(tmp_path):
    changes = {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"], "index_topk": 4}
    tiny = lively_checkpoint(tmp_path / "source", "glm_moe_dsa", config_changes=changes)
    (tmp_path / "work").mkdir()
    with torch.no_grad():
        expected = whole_model(tiny, "glm_moe_dsa")(IDS).logits
    assert_equal_logits(expected, streamed_logits(tmp_path / "source", work=tmp_path / "work"), rel_rms=2e-5)


def test_sequences_in_files_and_in_small_batches_give_the_same(tmp_path, monkeypatch):
    lively_checkpoint(tmp_path / "source", "kimi_k2")
    whole = streamed_logits(tmp_path / "source")
    (tmp_path / "work").mkdir()
    assert torch.equal(streamed_logits(tmp_path / "source", work=tmp_path / "work"), whole)
    monkeypatch.setattr(layer_module, "BATCH_TOKENS", 2 * IDS.shape[1])  # 2, 2 and 1 sequences
    assert_equal_logits(whole, streamed_logits(tmp_path / "source"), rel_rms=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_dense_models_equal_transformers(tmp_path, model_type, tied):
    """Saved by transformers, with or without a head of its own."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "source")
    with torch.no_grad():
        expected = model(IDS).logits
    assert_equal_logits(expected, streamed_logits(tmp_path / "source"), rel_rms=2e-5)


def test_a_config_that_does_not_fit_is_no_traceback(tmp_path):
    tiny = lively_checkpoint(tmp_path / "source", "glm_moe_dsa")
    tiny.config["num_experts_per_tok"] = 9
    tiny.write_config()
    with pytest.raises(SourceError, match=r"model\.layers\.1: transformers cannot run it"):
        streamed_logits(tmp_path / "source")


class Breaks:
    """An observer with a bug."""

    def __init__(self, call, error):
        self.call, self.error = call, error

    def linear(self, *_):
        self.end("linear")

    def expert(self, *_):
        self.end("expert")

    def cache(self, *_):
        self.end("cache")

    def end(self, call):
        if call == self.call:
            raise self.error


@pytest.mark.parametrize("model_type", ["glm4_moe", "kimi_k2"])  # keys and values by a cache, a latent by its expansion
@pytest.mark.parametrize(("call", "kind"), [("linear", RuntimeError), ("cache", IndexError), ("expert", ValueError)])
def test_an_error_of_an_observer_is_not_the_sources(tmp_path, model_type, call, kind):
    lively_checkpoint(tmp_path / "source", model_type)
    model, error = opened(tmp_path / "source"), kind("a bug")
    states = open_states(1, 4, model.hidden_size, dtype=torch.float32)
    states.hidden[:] = model.embed(IDS[0, :4])
    with pytest.raises(kind) as caught:
        model.layer(1).run(states, observer=Breaks(call, error))
    assert caught.value is error


def test_an_error_of_what_stands_for_the_experts_is_not_the_sources(tmp_path, monkeypatch):
    lively_checkpoint(tmp_path / "source", "glm4_moe")
    routing = StreamedLayer._routing
    monkeypatch.setattr(StreamedLayer, "_routing", lambda *states: replace(routing(*states), factors_TK=torch.ones(3)))
    with pytest.raises(RuntimeError, match="number of sizes"):
        streamed_logits(tmp_path / "source")


def test_a_missing_weight_is_named(tmp_path):
    tiny = lively_checkpoint(tmp_path / "source", "glm4_moe")
    tiny.remove("model.layers.1.self_attn.q_norm.weight")
    tiny.write()
    with pytest.raises(SourceError, match=r"model\.layers\.1\.self_attn\.q_norm\.weight: is missing"):
        streamed_logits(tmp_path / "source")


def test_a_weight_of_another_shape_is_named(tmp_path):
    tiny = lively_checkpoint(tmp_path / "source", "glm4_moe")
    tiny.put("model.layers.0.input_layernorm.weight", torch.ones(7, dtype=torch.bfloat16))
    tiny.write()
    with pytest.raises(SourceError, match=r"input_layernorm\.weight: is \[7\], transformers expects \[256\]"):
        streamed_logits(tmp_path / "source")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 0),  # no config of it, or no model: by each kind of error
        ("rms_norm_eps", "x"),
        ("rope_scaling", {"type": "yarn"}),
        ("rope_scaling", {"type": "dynamic", "factor": "x"}),
        ("hidden_act", "x"),
        ("num_labels", "x"),
    ],
)
def test_a_config_that_transformers_refuses_is_the_sources_fault(tmp_path, key, value):
    tiny = write_checkpoint(tmp_path / "source", model_type="glm4_moe")
    tiny.config[key] = value
    tiny.write_config()
    with pytest.raises(SourceError, match=r"config\.json: transformers cannot build Glm4Moe"):
        opened(tmp_path / "source")
    with pytest.raises(SourceError, match=r"source: transformers does not load it"):
        check_architecture(tmp_path / "source")


def test_a_mistake_of_ours_is_no_bad_source(tmp_path, monkeypatch):
    """A class that has not the parts which are asked of it."""
    import transformers

    write_checkpoint(tmp_path / "source", model_type="glm4_moe")
    monkeypatch.setattr(transformers, "Glm4MoeForCausalLM", lambda _: object())
    with pytest.raises(AttributeError):
        opened(tmp_path / "source")
    monkeypatch.setattr(transformers, "AutoModelForCausalLM", object)
    with pytest.raises(AttributeError):
        check_architecture(tmp_path / "source")


def test_a_release_without_the_class_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(architectures._CLASSES, "glm4_moe", "Nothing")
    write_checkpoint(tmp_path / "source", model_type="glm4_moe")
    with pytest.raises(SourceError, match="this release of transformers has no NothingConfig; install the"):
        opened(tmp_path / "source")


def test_states_without_room_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ResourceError, match="hidden states of"):
        open_states(1 << 20, 1 << 12, 6144, dtype=torch.float32, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_take_the_room_that_is_asked_for(tmp_path, dtype):
    lively_checkpoint(tmp_path / "source", "glm4_moe")
    (tmp_path / "work").mkdir()
    streamed_logits(tmp_path / "source", work=tmp_path / "work", dtype=dtype)
    sizes = {path.stem: path.stat().st_size for path in (tmp_path / "work").iterdir()}
    routing = sizes.pop("chosen") + sizes.pop("factors")  # a few numbers a token
    assert sum(sizes.values()) == state_bytes(IDS.numel(), 256, value_bytes=dtype.itemsize) > 10 * routing


def test_a_layer_is_loaded_while_another_thread_records_calls(tmp_path, monkeypatch):
    """Recording exchanges the skeleton's layers for a moment; the loader ahead must not see that."""
    lively_checkpoint(tmp_path / "source", "kimi_k2")
    model = opened(tmp_path / "source")
    loaded = []

    def forward(self, hidden, **options):
        loaded.append(model.layer(1).name)
        self.options = options
        return hidden

    monkeypatch.setattr(model_module._Call, "forward", forward)
    model.layer(0).arguments(2, 4)
    assert loaded == ["model.layers.1"] * model.num_layers


@pytest.mark.parametrize("content", [None, b"short"])
def test_states_that_a_resumed_run_needs_are_not_made_up(tmp_path, content):
    if content is not None:
        (tmp_path / "states-1.bin").write_bytes(content)
    states = open_states(2, 4, 8, dtype=torch.float32, directory=tmp_path, layer=1)
    with pytest.raises(SourceError, match=r"states-1\.bin.*256 bytes"):
        _ = states.hidden
