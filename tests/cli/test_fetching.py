"""A model on the hub is downloaded whole where that is asked for, and behind all that can be checked without it."""

import pytest
import torch
import yaml
from huggingface_hub import close_session, constants
from safetensors.torch import save_file

from quantkit.checkpoint import http_range
from quantkit.recipe import builtin_recipe
from quantkit.recipe_files import recipe_summaries
from tests.checkpoint.hub_server import REPOSITORY, serve
from tests.cli.inside import refusal, run_inside
from tests.streaming.models import lively_checkpoint


@pytest.fixture
def source(tmp_path):
    return lively_checkpoint(tmp_path / "source", "glm_moe_dsa").directory


@pytest.fixture
def hub(source, tmp_path, monkeypatch):
    """The repository, whose handler notes what is asked of it; the current directory is empty."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(http_range, "_PAUSES", (0, 0, 0))
    with serve(source) as (handler, endpoint):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield handler
        close_session()


@pytest.fixture
def files(tmp_path):
    """What a command is given, by the word that stands for it."""
    save_file({"input_ids": torch.arange(64).view(4, 16)}, tmp_path / "tokens.safetensors")
    save_file({"input_ids": torch.full((2, 8), 1 << 30)}, tmp_path / "others.safetensors")
    (tmp_path / "there.safetensors").write_bytes(b"x")
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe\xfa")
    name = next(one.name for one in recipe_summaries() if one.hub_id == REPOSITORY)
    recipe = builtin_recipe(name).model_dump(mode="json", exclude_defaults=True, exclude={"calibration"})
    (tmp_path / "gptq.yaml").write_text(yaml.safe_dump({**recipe, "method": "gptq"}))
    names = ("tokens.safetensors", "others.safetensors", "there.safetensors", "latin.txt", "gptq.yaml")
    return {name.partition(".")[0].upper(): tmp_path / name for name in names}


def shards_fetched(handler):
    shards = (one for one in handler.requests if one.method == "GET" and one.name.endswith(".safetensors"))
    return [one.name for one in shards if "range" not in one.headers]


KEEP = "--keep-source"
GPTQ = ("convert", REPOSITORY, "--method", "gptq", "--streaming")
CALIBRATE = ("calibrate", REPOSITORY, "-o", "s.safetensors")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("convert", REPOSITORY, "--method", "gptq", KEEP), "comes from --text or from --tokens"),
        ((*GPTQ, KEEP), "comes from --text or from --tokens"),
        ((*GPTQ, KEEP, "--text", "nope.txt"), "nope.txt: cannot be read"),
        ((*GPTQ, KEEP, "--text", "LATIN"), "is not UTF-8"),
        ((*GPTQ, KEEP, "--tokens", "OTHERS"), "the vocabulary has"),
        ((*GPTQ, KEEP, "--tokens", "TOKENS", "--device", "cuda:7"), "cuda:7"),
        ((*GPTQ, KEEP, "--tokens", "TOKENS", "--group-size", "96"), "96"),
        ((*GPTQ, "--tokens", "TOKENS"), "--method gptq runs the model, and its shards are still on the hub"),
        (
            ("convert", REPOSITORY, "--recipe", "GPTQ", "--streaming", "--tokens", "TOKENS"),
            "--method gptq runs the model, and its shards are still on the hub",
        ),
        (("convert", REPOSITORY, KEEP, "--method", "search", "--text", "LATIN"), "without --method"),
        (("calibrate", REPOSITORY, KEEP, "--tokens", "TOKENS", "-o", "THERE"), "exists already"),
        ((*CALIBRATE, KEEP, "--text", "nope.txt"), "nope.txt: cannot be read"),
        ((*CALIBRATE, KEEP, "--tokens", "OTHERS"), "the vocabulary has"),
        ((*CALIBRATE, KEEP, "--tokens", "TOKENS", "--device", "cuda:7"), "cuda:7"),
        ((*CALIBRATE, "--tokens", "TOKENS"), "calibrate runs the model, and its shards are still on the hub"),
        (("evaluate", REPOSITORY, "nope", KEEP, "--tokens", "TOKENS"), "nope"),
        (("evaluate", REPOSITORY, "SOURCE", KEEP, "--text", "nope.txt"), "nope.txt: cannot be read"),
        (("evaluate", REPOSITORY, "SOURCE", KEEP, "--tokens", "TOKENS", "--device", "cuda:7"), "cuda:7"),
        (("evaluate", REPOSITORY, "SOURCE", "--tokens", "TOKENS"), "evaluate runs the model, and its shards"),
    ],
)
def test_what_is_wrong_is_said_before_a_shard_is_fetched(arguments, words, hub, source, files):
    names = {**files, "SOURCE": source}
    error = refusal(*(names.get(one, one) for one in arguments))
    assert words in str(error)
    assert error.remedy
    if "still on the hub" in words:
        assert error.remedy == "give --keep-source, or name a directory"
    assert shards_fetched(hub) == []


def test_an_output_of_the_default_name_is_found_before_a_shard_is_fetched(hub, tmp_path):
    (tmp_path / "here" / "GLM-5.2-FP8-int4").mkdir()
    assert "exists" in str(refusal("convert", REPOSITORY, KEEP))
    assert shards_fetched(hub) == []


def test_with_keep_source_the_three_run_a_model_from_the_hub(hub, source, files, tmp_path, monkeypatch):
    tokens = ("--tokens", files["TOKENS"], "-q")
    run_inside(*CALIBRATE, KEEP, *tokens)
    assert len(shards_fetched(hub)) == len(list(source.glob("*.safetensors")))
    run_inside("calibrate", source, "-o", "local.safetensors", *tokens)
    assert (tmp_path / "here/s.safetensors").read_bytes() == (tmp_path / "here/local.safetensors").read_bytes()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # what was kept serves without the hub
    run_inside(*GPTQ, KEEP, "-o", "far", *tokens)
    run_inside("convert", source, "--method", "gptq", "--streaming", "-o", "near", *tokens)
    shards = {path.name: path.read_bytes() for path in (tmp_path / "here/near").glob("*.safetensors")}
    assert shards
    assert {path.name: path.read_bytes() for path in (tmp_path / "here/far").glob("*.safetensors")} == shards
    assert run_inside("evaluate", REPOSITORY, tmp_path / "here/near", KEEP, *tokens) == 0
