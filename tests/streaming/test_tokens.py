"""Texts become windows of tokens by a real tokenizer; what is no text or no tokenizer is refused."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from quantkit.errors import SourceError, UsageError
from quantkit.streaming import Tokens, read_tokens, tokenize


@pytest.fixture
def model(tmp_path):
    """A byte-level tokenizer that would begin every text with a special token."""
    directory = tmp_path / "model"
    directory.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)} | {"<begin>": 256}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 256)])
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return directory


def text(tmp_path, content):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    return path


def test_a_text_is_cut_into_windows_and_the_rest_dropped(tmp_path, model):
    tokens = tokenize(text(tmp_path, b"abcdefgh" * 3), model, vocabulary=257, length=5)
    reference = Tokenizer.from_file(str(model / "tokenizer.json")).encode("abcdefgh" * 3, add_special_tokens=False)
    assert tokens.ids_NS.tolist() == np.array(reference.ids[:20]).reshape(4, 5).tolist()
    assert 256 not in tokens.ids_NS


def test_the_first_windows_are_taken(tmp_path, model):
    path = text(tmp_path, b"abcdefgh" * 3)
    few = tokenize(path, model, vocabulary=257, length=4, sequences=2)
    assert np.array_equal(few.ids_NS, tokenize(path, model, vocabulary=257, length=4).ids_NS[:2])


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "has 0 tokens"), (b"abc", "has 3 tokens, fewer than one sequence of 8"), (b"\xff\xfe", "not UTF-8")],
)
def test_texts_that_cannot_be_meant_are_refused(tmp_path, model, content, message):
    with pytest.raises(SourceError, match=message):
        tokenize(text(tmp_path, content), model, vocabulary=257, length=8)


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path, model):
    with pytest.raises(SourceError, match="the vocabulary has 10"):
        tokenize(text(tmp_path, b"abcdefgh"), model, vocabulary=10, length=8)


def test_a_length_of_one_says_nothing_of_the_next_token(tmp_path, model):
    with pytest.raises(UsageError, match="too short"):
        tokenize(text(tmp_path, b"abcdefgh"), model, vocabulary=257, length=1)


def test_a_tokenizer_with_code_of_its_own_is_not_run(tmp_path, model):
    ran = tmp_path / "ran"
    (model / "tokenizer.json").unlink()
    (model / "tokenization_own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match="without its own code"):
        tokenize(text(tmp_path, b"abcdefgh"), model, vocabulary=257, length=4)
    assert not ran.exists()


def test_a_text_too_short_may_be_cut_shorter(tmp_path, model):
    with pytest.raises(SourceError) as caught:
        tokenize(text(tmp_path, b"a" * 21), model, vocabulary=257, length=512)
    assert caught.value.remedy == "give a longer text, or a --length of at most 21"


def test_a_checkpoint_without_tokenizer_is_told_what_it_lacks(tmp_path):
    with pytest.raises(SourceError) as caught:
        tokenize(text(tmp_path, b"prose"), tmp_path, vocabulary=257, length=2)
    assert caught.value.message.startswith("there is no tokenizer.json (nor tokenizer_config.json, ")
    assert "--tokens" in caught.value.remedy


def test_a_text_is_no_file_of_tokens(tmp_path):
    path = text(tmp_path, "Prose, in m\u00fcnchen, and no tensors at all.\n".encode() * 20)
    with pytest.raises(SourceError, match="is a text") as caught:
        read_tokens(path, vocabulary=257)
    assert caught.value.remedy == "give it with --text"


def test_the_hash_tells_shapes_apart():
    ids = np.arange(12)
    assert Tokens(ids_NS=ids.reshape(3, 4)).sha256 != Tokens(ids_NS=ids.reshape(4, 3)).sha256
