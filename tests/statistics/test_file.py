"""A statistics file: what is written is read by the safetensors library, and what cannot be meant is refused."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quantkit.errors import SourceError, UsageError
from quantkit.statistics.file import open_statistics, write_statistics
from quantkit.statistics.fingerprint import Fingerprint

ABC = Fingerprint(norms="abc", samples={"attention/fp8-128x128": "0" * 64, "embedding/float": "1" * 64})
ARRAYS = {
    "model.layers.0.mlp.down_proj.input_second_moment": np.array([0.5, 2.0], np.float32),
    "model.layers.0.mlp.down_proj.token_count": np.array(7, np.int64),
}


def test_the_safetensors_library_reads_what_was_written(tmp_path):
    path = tmp_path / "stats.safetensors"
    write_statistics(path, ARRAYS, model=ABC, about={"tokens": "7"})
    found = load_file(path)
    assert found.keys() == ARRAYS.keys()
    assert all(np.array_equal(found[name], ARRAYS[name]) for name in ARRAYS)
    opened = open_statistics(path)
    assert (opened.fingerprint, opened.metadata["tokens"]) == (ABC, "7")
    assert opened.read("model.layers.0.mlp.down_proj.token_count") == 7


def test_an_existing_file_is_not_written_over(tmp_path):
    path = tmp_path / "stats.safetensors"
    write_statistics(path, ARRAYS, model=ABC, about={})
    before = path.read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        write_statistics(path, {}, model=Fingerprint(norms="other"), about={})
    assert path.read_bytes() == before


def test_a_link_is_not_written_over_wherever_it_leads(tmp_path):
    path = tmp_path / "stats.safetensors"
    path.symlink_to(tmp_path / "nowhere.safetensors")
    with pytest.raises(UsageError, match="exists already"):
        write_statistics(path, ARRAYS, model=ABC, about={})
    assert path.is_symlink()
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("metadata", [None, {"quantkit_statistics": "9"}])
def test_another_file_is_refused(tmp_path, metadata):
    path = tmp_path / "stats.safetensors"
    save_file({"x": np.zeros(3, np.float32)}, path, metadata)
    with pytest.raises(SourceError, match="statistics file"):
        open_statistics(path)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1.0])
def test_what_no_calibration_writes_is_refused(tmp_path, wrong):
    path = tmp_path / "stats.safetensors"
    write_statistics(path, {"x": np.array([1.0, wrong], np.float32)}, model=ABC, about={})
    with pytest.raises(SourceError, match="x: holds"):
        open_statistics(path).read("x")


def test_statistics_of_another_model_are_refused(tmp_path):
    path = tmp_path / "stats.safetensors"
    write_statistics(path, ARRAYS, model=ABC, about={})
    open_statistics(path).check_model(ABC)
    with pytest.raises(SourceError, match="another model or revision"):
        open_statistics(path).check_model(Fingerprint(norms="abd"))


def test_samples_that_both_have_tell_models_apart():
    """Another form has other samples; an older file none."""
    assert ABC.difference(Fingerprint(norms="abc")) is None
    assert ABC.difference(Fingerprint(norms="abc", samples={"attention/float": "2" * 64})) is None
    other = Fingerprint(norms="abc", samples=dict.fromkeys(ABC.samples, "2" * 64))
    assert ABC.difference(other) == "weights of attention, embedding"
    assert ABC.difference(Fingerprint(norms="other", samples=ABC.samples)) == "the gains of their norms"
