"""Directories of runs: whose they are, and what is told of another run."""

import pytest

from quantkit.checkpoint.begun import begin_directory, differences
from quantkit.errors import SourceError, UsageError

RUN = {"tokens": "0" * 64, "options": {"dtype": "float32"}}


def test_a_run_that_was_cut_before_it_had_begun_begins(tmp_path):
    for left in ((), ("begun.json.draft",)):
        directory = tmp_path / f"run-{len(left)}"
        directory.mkdir()
        for name in left:
            (directory / name).write_text("{")
        begin_directory(directory / "begun.json", RUN, resume=True)
        assert [path.name for path in directory.iterdir()] == ["begun.json"]


def test_what_differs_is_told_and_hashes_only_where_asked(tmp_path):
    path = tmp_path / "run" / "begun.json"
    begin_directory(path, RUN, resume=True)
    with pytest.raises(UsageError, match=r"options\.dtype was .float32. and is .bfloat16.; tokens has changed;"):
        begin_directory(path, {"tokens": "1" * 64, "options": {"dtype": "bfloat16"}}, resume=True)
    assert list(differences({"a": "0" * 64}, {"a": "x"}, ("a",))) == [f'a was "{"0" * 64}" and is "x"']
    assert list(differences({"a": 1}, {"b": 1})) == ["a is no longer there", "b is new"]


@pytest.mark.parametrize("content", ["[]", "", "{"])
def test_a_document_that_is_none_is_an_error_and_can_be_thrown_away(tmp_path, content):
    path = tmp_path / "run" / "begun.json"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(SourceError, match="is not"):
        begin_directory(path, RUN, resume=True)
    begin_directory(path, RUN, resume=False)
    begin_directory(path, RUN, resume=True)
