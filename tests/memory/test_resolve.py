"""What MODEL stands for, and that no more is read for it than its name needs."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import close_session, constants

from quantkit.errors import RecipeError, SourceError, UsageError
from quantkit.memory import resolve
from quantkit.memory.resolve import recipe_model, resolve_model
from quantkit.recipe_files import recipe_config, recipe_paths
from tests.checkpoint.hub_server import COMMIT, REPOSITORY, serve
from tests.tiny import tiny_config

ROUTER = "model.layers.1.mlp.gate.weight"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty directory, and a hub that must not be asked."""
    directory = tmp_path / "here"
    directory.mkdir()
    monkeypatch.chdir(directory)

    def refuse(hub_id, revision):
        pytest.fail(f"the hub is asked for {hub_id}")

    monkeypatch.setattr(resolve, "open_remote", refuse)
    return directory


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Serves a directory as the one repository of a local hub, which may be asked."""
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)

    def point(endpoint):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    yield point
    close_session()


def stored_bytes(model):
    return sum(group.count * group.spec.num_bytes for group in model.tensors(model.scheme))


def file_bytes(directory):
    """Bytes of tensors in the shards of a directory: a file less its header, and the length in front of it."""
    total = 0
    for path in directory.glob("*.safetensors"):
        content = path.read_bytes()
        total += len(content) - 8 - int.from_bytes(content[:8], "little")
    return total


def write_config(directory, config, name="config.json"):
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("name", recipe_paths())
def test_a_recipe_is_the_config_of_its_source(name):
    model = resolve_model(name)
    assert model.name == name
    assert model.config == recipe_config(name)
    assert model.family.is_known
    assert model.weights_from.startswith(f"config of {'zai-org/GLM' if 'glm' in name else 'moonshotai/Kimi'}-")
    assert model.weights_from.endswith(" as shipped (name the hub id to count its headers)")


def test_a_recipe_names_the_source_that_it_stands_for():
    assert "zai-org/GLM-5.2-FP8 " in recipe_model("glm-5.2").weights_from
    assert str(recipe_model("glm-5.2").scheme) == "FP8"
    assert str(recipe_model("kimi-k2.5").scheme) == "INT4 experts in groups of 32, rest BF16"


def test_a_directory_is_counted_from_its_headers(here, tiny_checkpoint):
    source = tiny_checkpoint()
    router = source.tensor(ROUTER)
    assert router.dtype == torch.bfloat16
    expected = stored_bytes(resolve_model(str(write_config(here / "config", source.config))))
    assert expected == file_bytes(source.directory)
    source.put(ROUTER, router.float())  # what no config tells
    source.write()
    model = resolve_model(str(source.directory))
    assert (model.name, model.weights_from) == ("source", "headers of 2 shards in source")
    assert stored_bytes(model) == file_bytes(source.directory) == expected + 2 * router.numel()
    assert model.config == source.config


@pytest.mark.parametrize("source_format", ["fp8_block", "fp8_channel", "bf16", "f16", "int4_native"])
def test_a_config_taken_at_its_word_counts_what_the_headers_do(source_format, here, tiny_checkpoint):
    source = tiny_checkpoint(model_type="kimi_k25", source_format=source_format)
    counted = resolve_model(str(source.directory))
    assumed = resolve_model(str(write_config(here / "config", source.config)))
    assert counted.scheme == assumed.scheme
    assert stored_bytes(counted) == stored_bytes(assumed) == file_bytes(source.directory)


def test_a_directory_with_only_a_config(here):
    model = resolve_model(str(write_config(here / "GLM-tiny", tiny_config("glm4_moe"))))
    assert (model.name, model.family.name) == ("GLM-tiny", "glm4_moe")
    assert model.weights_from == "config.json taken at its word (headers would be counted)"


def test_a_config_is_called_by_its_folder_or_by_its_own_name(here):
    folder = write_config(here / "GLM-tiny", tiny_config("glm4_moe"))
    write_config(folder, tiny_config("deepseek_v3"), "other.json")
    by_folder, by_name = resolve_model("GLM-tiny/config.json"), resolve_model("GLM-tiny/other.json")
    assert (by_folder.name, by_folder.family.name) == ("GLM-tiny", "glm4_moe")
    assert (by_name.name, by_name.family.name) == ("other", "deepseek_v3")
    assert by_name.weights_from == "other.json taken at its word (headers would be counted)"


def test_a_config_beside_shards_is_taken_at_its_word(tiny_checkpoint):
    source = tiny_checkpoint()
    model = resolve_model(str(source.directory / "config.json"))
    assert model.weights_from.startswith("config.json taken at its word")
    (source.directory / "model-00001-of-00002.safetensors").unlink()
    assert stored_bytes(model) > file_bytes(source.directory)


def test_no_name_is_what_lies_here(here, tiny_checkpoint, monkeypatch):
    assert resolve_model(None) is None
    write_config(here, tiny_config("glm4_moe"))
    assert resolve_model(None).name == "here"
    assert "at its word" in resolve_model(None).weights_from
    source = tiny_checkpoint()
    monkeypatch.chdir(source.directory)
    assert (resolve_model(None).name, resolve_model(None).weights_from) == ("source", "headers of 2 shards in source")


def test_a_hub_id_is_counted_from_headers_and_no_shard_is_served_whole(tiny_checkpoint, hub):
    source = tiny_checkpoint("hub", mtp=True)
    with serve(source.directory) as (handler, endpoint):
        hub(endpoint)
        model = resolve_model(REPOSITORY)
    assert model.name == REPOSITORY
    assert model.weights_from == f"headers of 2 shards on the hub, {COMMIT[:12]}"
    assert model.config == source.config
    assert stored_bytes(model) == file_bytes(source.directory)
    shards = {path.name: path.stat().st_size for path in source.directory.glob("*.safetensors")}
    assert len(shards) == 2
    for name, size in shards.items():
        assert 0 < handler.served[name] <= 1 << 16 < size / 4


@pytest.mark.parametrize(("suffix", "revision"), [("", "main"), ("@v1.0", "v1.0"), ("@refs/pr/7", "refs%2Fpr%2F7")])
def test_a_revision_is_asked_for(suffix, revision, tiny_checkpoint, hub):
    with serve(tiny_checkpoint("hub").directory) as (handler, endpoint):
        hub(endpoint)
        assert resolve_model(REPOSITORY + suffix).name == REPOSITORY + suffix
    assert handler.requests[0].path.partition("?")[0] == f"/api/models/{REPOSITORY}/revision/{revision}"


def test_a_directory_goes_before_the_hub(here, tiny_checkpoint):
    (here / "zai-org").mkdir()
    tiny_checkpoint("here/zai-org/GLM")
    assert resolve_model("zai-org/GLM").weights_from == "headers of 2 shards in GLM"


def test_a_name_of_a_recipe_and_of_a_directory_is_refused(here, tiny_checkpoint):
    tiny_checkpoint("here/glm-5.2")
    with pytest.raises(UsageError, match="is a recipe and a directory here") as caught:
        resolve_model("glm-5.2")
    assert caught.value.remedy == "write ./glm-5.2 for the directory"
    assert resolve_model("./glm-5.2").weights_from == "headers of 2 shards in glm-5.2"
    assert resolve_model("glm-5.1").weights_from.startswith("config of ")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("glm-5.22", "did you mean glm-5.2 or glm-5."),
        ("GLM-5.2", "did you mean glm-5.2 or "),
        ("kimi-k", "did you mean kimi-k2 or "),
        ("unheard-of", "see quantkit recipes, or name a hub id or a directory"),
    ],
)
def test_a_word_that_is_nothing_gets_the_nearest_recipes(name, remedy):
    with pytest.raises(RecipeError, match=f"'{name}' is neither a recipe nor a directory here") as caught:
        resolve_model(name)
    assert caught.value.remedy.startswith(remedy)


@pytest.mark.parametrize("name", ["./gone", "../gone", "/gone", "a/b/c", ".gone", "~/gone"])
def test_a_path_that_is_not_there_is_no_hub_id(name):
    with pytest.raises(SourceError) as caught:
        resolve_model(name)
    assert str(caught.value) == f"{name}: is not there; name a recipe, a config.json, a directory or a hub id"


def test_a_config_that_is_not_there(here):
    for name, file in (("gone.json", "gone.json"), ("org/gone.json", "gone.json"), (str(here), "config.json")):
        with pytest.raises(SourceError) as caught:
            resolve_model(name)
        assert Path(caught.value.file).name == file
        assert caught.value.message == "is missing"
        assert caught.value.remedy.startswith("name a config.json, a recipe")


def test_a_config_of_an_unknown_family_is_sent_to_the_headers(here, tiny_checkpoint):
    source = tiny_checkpoint(model_type="deepseek_v3")
    source.config |= {"model_type": "who_knows"}
    source.write()
    with pytest.raises(SourceError, match="'who_knows' is not a known family") as caught:
        resolve_model(str(source.directory / "config.json"))
    assert "its headers tell" in caught.value.remedy
    model = resolve_model(str(source.directory))
    assert not model.family.is_known
    assert stored_bytes(model) == file_bytes(source.directory)
