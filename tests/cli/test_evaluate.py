"""`quantkit evaluate`: its document, thresholds, refusals, and what it leaves behind."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.inside import refusal, run_inside
from tests.cli.test_commands import document, run
from tests.convert.helpers import convert
from tests.streaming.models import lively_checkpoint


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A source, its output, another model of the same sizes, and one of an architecture that is not supported."""
    directory = tmp_path_factory.mktemp("models")
    lively_checkpoint(directory / "source", "glm_moe_dsa")
    convert(directory / "source", directory / "out")
    other = lively_checkpoint(directory / "other", "glm_moe_dsa")
    name = "model.layers.0.input_layernorm.weight"
    other.put(name, other.tensor(name) * 2)
    other.write()
    mamba = lively_checkpoint(directory / "mamba", "glm_moe_dsa")
    mamba.config["model_type"] = "mamba"
    mamba.write_config()
    return directory


@pytest.fixture
def pair(models):
    return models / "source", models / "out"


def tokens(tmp_path, ids=None, name="ids"):
    path = tmp_path / f"{name}.safetensors"
    save_file({"input_ids": torch.arange(96).view(4, 24) if ids is None else ids}, path)
    return path


def evaluated(capsys, *arguments):
    """The document and the exit code; in this process, as what runs a model is slow to import."""
    code = run_inside("evaluate", *arguments, "--json", "-q")
    return json.loads(capsys.readouterr().out), code


def refused(*arguments):
    return refusal("evaluate", *arguments, "-q")


def add_tokenizer(directory):
    """Every letter is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {chr(code): code for code in range(32, 127)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    config = (directory / "config.json").read_bytes()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=" ").save_pretrained(directory)
    (directory / "config.json").write_bytes(config)


def test_the_document_the_table_the_page_and_the_summary(pair, tmp_path):
    arguments = ["evaluate", *pair, "--tokens", tokens(tmp_path), "--report", tmp_path / "e.html"]
    result = run(*arguments, "--summary", tmp_path / "e.md", "--json")
    assert result.returncode == 0, result.stderr
    found = document(result, "evaluate")
    assert found["tokens"]["num_predictions"] == 4 * 23
    assert found["perplexity"]["ratio"] == pytest.approx(found["perplexity"]["output"] / found["perplexity"]["source"])
    kl = found["kl_divergence"]
    assert 0 < kl["median"] <= kl["p90"] <= kl["p99"] <= kl["p99_9"] <= kl["max"]
    assert found["kl_histogram"]["below"] + sum(found["kl_histogram"]["counts"]) == 4 * 23
    assert [one["layer"] for one in found["layers"]] == [0, 1]
    assert found["layers"][1]["weight_errors"]["routed_expert"] == pytest.approx(0.08, abs=0.005)
    for side, directory in zip(("source_bytes", "output_bytes"), pair, strict=True):
        inspected = document(run("inspect", directory, "--json"), "inspect")
        assert sum(one[side] for one in found["sizes"]) == inspected["num_bytes"]
    assert "evaluate: 100%" in result.stderr
    assert "compare weights: 100%" in result.stderr
    summary = (tmp_path / "e.md").read_text()
    assert summary.startswith("## quantkit evaluate: ok\n")
    again = run(*arguments)  # the page of before is replaced
    assert again.returncode == 0, again.stderr
    for text in (again.stdout, summary, (tmp_path / "e.html").read_text()):
        assert f"{found['perplexity']['output']:.4f}" in text
        assert f"{kl['p99']:.3g}" in text
    assert {path.name for path in tmp_path.iterdir()} == {"ids.safetensors", "e.html", "e.md"}


def test_a_text_is_cut_into_sequences(models, tmp_path, capsys):
    shutil.copytree(models / "source", tmp_path / "source")
    add_tokenizer(tmp_path / "source")
    pair = tmp_path / "source", models / "out"
    text = "It was a bright cold day in April, and the clocks were striking thirteen." * 3
    (tmp_path / "text.txt").write_text(text)
    options = ["--text", tmp_path / "text.txt", "--length", "32"]
    found, _ = evaluated(capsys, *pair, *options)
    assert (found["tokens"]["num_sequences"], found["tokens"]["length"]) == (len(text) // 32, 32)
    ids = torch.tensor([ord(one) for one in text[: len(text) // 32 * 32]]).view(-1, 32)
    same, _ = evaluated(capsys, *pair, "--tokens", tokens(tmp_path, ids))
    assert same["tokens"]["sha256"] == found["tokens"]["sha256"]
    assert same["kl_divergence"] == found["kl_divergence"]
    few, _ = evaluated(capsys, *pair, *options, "--sequences", "1", "--fast")
    assert few["tokens"]["num_sequences"] == 1
    assert few["kl_divergence"]["standard_error"] is None
    assert few["errors"] == []
    assert any("one sequence" in warning for warning in few["warnings"])
    (tmp_path / "text.txt").write_text(text[:31])
    error = refused(*pair, *options)
    assert error.exit_code == 3
    assert "has 31 tokens, fewer than one sequence of 32" in str(error)
    (tmp_path / "text.txt").write_text("")
    assert "has 0 tokens" in str(refused(*pair, *options))


def test_a_pipeline_fails_where_a_threshold_is_missed(pair, tmp_path, capsys):
    ids = tokens(tmp_path)
    found, code = evaluated(capsys, *pair, "--tokens", ids, "--fast", "--max-kl", "1", "--min-top1", "0.5")
    assert (found["status"], found["failures"], code) == ("ok", [], 0)
    kl = found["kl_divergence"]["mean"]
    options = ["--max-kl", f"{kl * 0.9}", "--min-top1", "1"]
    result = run("evaluate", *pair, "--tokens", ids, "--fast", *options, "--summary", tmp_path / "s.md", "-q", "--json")
    assert result.returncode == 4
    failed = document(result, "evaluate")
    assert failed["status"] == "failed"
    assert f"mean KL divergence {kl:.4g} is above {kl * 0.9:g}" in failed["failures"]
    assert all(f"quantkit: {one}" in result.stderr for one in failed["failures"])
    assert (tmp_path / "s.md").read_text().startswith("## quantkit evaluate: failed")
    exact, code = evaluated(capsys, *pair, "--tokens", ids, "--fast", "--max-kl", repr(kl))
    assert (exact["failures"], code) == ([], 0)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["SOURCE", "OUT"], 2, "--text or from --tokens"),
        (["SOURCE", "OUT", "--text", "TEXT", "--tokens", "IDS"], 2, "--text or from --tokens"),
        (["SOURCE", "OUT", "--tokens", "IDS", "--length", "8"], 2, "--length"),
        (["SOURCE", "OUT", "--tokens", "IDS", "--dtype", "float16"], 2, "--dtype float16"),
        (["SOURCE", "OUT", "--tokens", "IDS", "--device", "cuda:7"], 2, "--device cuda:7"),
        (
            ["SOURCE", "OUT", "--tokens", "IDS", "--report", "page.txt"],
            2,
            "--report page.txt is not the name of a page",
        ),
        (["SOURCE", "OUT", "--tokens", "IDS", "--report", "no/page.html"], 2, "lies in no directory"),
        (["SOURCE", "OUT", "--tokens", "IDS", "--report", "OTHERS"], 2, "no page of ours"),
        (["SOURCE", "OUT", "--tokens", "IDS", "--work", "TEXT"], 2, "--work"),
        (["SOURCE", "OUT", "--text", "TEXT"], 3, "no tokenizer"),
        (["SOURCE", "OUT", "--tokens", "BEYOND"], 3, "holds token 128 at [0, 0], the vocabulary has 128"),
        (["SOURCE", "OUT", "--tokens", "nowhere"], 3, "nowhere"),
        (["SOURCE", "./nowhere", "--tokens", "IDS"], 3, "is not a directory"),
        (["SOURCE", "TEXT", "--tokens", "IDS"], 3, "is not a directory"),
        (["nothing-like-it", "OUT", "--tokens", "IDS"], 2, "neither a directory here nor a recipe"),
        (["SOURCE", "OTHER", "--tokens", "IDS"], 3, "is another model than the source"),
        (["MAMBA", "OUT", "--tokens", "IDS"], 3, "supported: glm_moe_dsa"),
    ],
)
def test_refusals_say_what_and_leave_nothing(pair, models, tmp_path, options, code, words):
    (tmp_path / "text.txt").write_text("a few words")
    (tmp_path / "others.html").write_text("<html>somebody else's</html>")
    places = {
        "SOURCE": pair[0],
        "OUT": pair[1],
        "OTHER": models / "other",
        "MAMBA": models / "mamba",
        "TEXT": tmp_path / "text.txt",
        "OTHERS": tmp_path / "others.html",
        "IDS": tokens(tmp_path),
        "BEYOND": tokens(tmp_path, torch.full((2, 8), 128), name="beyond"),
    }
    before = {path.name for path in tmp_path.iterdir()}
    error = refused(*(places.get(one, one) for one in options))
    assert error.exit_code == code
    assert words in str(error)
    assert error.remedy
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_threshold_that_cannot_be_meant_is_refused(pair, tmp_path):
    for option in (["--max-kl", "-1"], ["--min-top1", "95"]):
        result = run("evaluate", *pair, "--tokens", tokens(tmp_path), *option)
        assert result.returncode == 2
        assert re.search(option[0], result.stderr)


@pytest.mark.parametrize("option", ["--max-kl", "--min-top1"])
def test_a_limit_that_nothing_misses_is_refused(pair, tmp_path, option):
    error = refused(*pair, "--tokens", tokens(tmp_path), option, "nan")
    assert error.exit_code == 2
    assert option in str(error)
