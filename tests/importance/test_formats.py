"""The three formats, each as its own writer makes it, end in the same entries."""

import re
import subprocess
import sys

import numpy as np
import pytest
from gguf.constants import MODEL_ARCH
from gguf.tensor_mapping import get_tensor_name_map
from safetensors.numpy import load_file, save_file

from quantkit.errors import SourceError, UsageError
from quantkit.importance.names import LLAMA_CPP, Place, places_of
from quantkit.importance.open import open_importance
from quantkit.numerics.shrinkage import shape_of
from tests.importance.files import LAYER, TOKENS, expert_entries, write_dat, write_gguf, write_statistics

NAME = "blk.1.ffn_down_exps"


@pytest.fixture
def entries():
    dense = np.exp(np.random.default_rng(8).normal(size=256)).astype(np.float32)
    return expert_entries() | {"blk.1.attn_output": (dense, [941])}


def test_rows_and_tokens_of_a_gguf(entries, tmp_path):
    found = open_importance(write_gguf(tmp_path / "imatrix.gguf", entries))
    assert found.kind == "imatrix.gguf"
    assert found.about == {"datasets": "calibration.txt, more.txt", "chunk_count": "30", "chunk_size": "512"}
    assert found.entries.keys() == entries.keys()
    for name, (moments, tokens) in entries.items():
        rows, entry = moments.reshape(len(tokens), -1), found.entries[name]
        for row, count in enumerate(tokens):
            assert entry.tokens_of(row, rows.shape[1]) == count
            sums = (rows[row] * np.float32(count)).astype(np.float64)
            assert np.array_equal(entry.read_row(row, rows.shape[1]), sums)


@pytest.mark.parametrize("ending", [True, False])
def test_rows_of_a_dat(ending, entries, tmp_path):
    """Tokens are not told, but that there were none is."""
    found = open_importance(write_dat(tmp_path / "any.name", entries, ending=ending))
    assert found.kind == "imatrix.dat"
    assert found.about == ({"calls": "30", "datasets": "calibration.txt"} if ending else {})
    for name, (moments, tokens) in entries.items():
        rows, entry = moments.reshape(len(tokens), -1), found.entries[name]
        for row, count in enumerate(tokens):
            assert entry.tokens_of(row, rows.shape[1]) == (None if count else 0)
            if count:
                assert np.allclose(shape_of(entry.read_row(row, rows.shape[1])), shape_of(rows[row].astype(float)))


def test_a_gguf_that_was_made_of_a_dat(entries, tmp_path):
    """llama-imatrix reads the older format as sums with one count for all experts; ones of an unseen expert stay."""
    moments, tokens = entries[NAME]
    sums = np.where(np.array(tokens)[:, None] > 0, moments, np.float32(1)) * np.float32(1024)
    changes = {f"{NAME}.weight.in_sum2": sums.reshape(-1), f"{NAME}.weight.counts": np.array([1024], np.float32)}
    entry = open_importance(write_gguf(tmp_path / "x.gguf", entries, changes=changes)).entries[NAME]
    assert [entry.tokens_of(row, 128) for row in range(4)] == [None, None, 0, None]


def test_statistics_of_this_tool(entries, tmp_path):
    found = open_importance(write_statistics(tmp_path / "s.safetensors", entries, model="abc"))
    assert (found.kind, found.model) == ("statistics", "abc")
    assert found.about == {"model": "abc", "quantkit_statistics": "1", "tokens": "941"}
    entry = found.entries[f"{LAYER}.gate_up_proj"]
    assert entry.tokens == tuple(TOKENS)
    assert np.array_equal(entry.read_row(3, 256), entries["blk.1.ffn_up_exps"][0][3].astype(np.float64))


@pytest.mark.parametrize("arch", ["DEEPSEEK2", "GLM4_MOE", "GLM_DSA", "QWEN3MOE"])
def test_names_are_those_of_llama_cpp(arch):
    """Its own table, where that has a line for this architecture."""
    table = get_tensor_name_map(MODEL_ARCH[arch], 9)
    known = {rest: table.get_name(f"model.layers.3.{rest}") for rest in LLAMA_CPP}
    known = {rest: name for rest, name in known.items() if name is not None}
    assert {"mlp.gate", "self_attn.o_proj"} <= known.keys()
    for rest, name in known.items():
        assert places_of(f"model.layers.3.{rest}", kind="imatrix.gguf", root="model.") == (Place(name),)
    for leaf in ("gate", "up", "down"):
        merged = table.get_name(f"model.layers.3.mlp.experts.{leaf}_proj")
        module = f"language_model.model.layers.3.mlp.experts.17.{leaf}_proj"
        assert places_of(module, kind="imatrix.dat", root="language_model.model.")[0] == Place(merged, 17)
    assert places_of("lm_head", kind="imatrix.dat", root="model.") == (Place(table.get_name("lm_head")),)


def test_what_is_no_layer_of_the_text_model_has_no_place():
    for module in ("vision_tower.layers.3.self_attn.q_proj", "model.layers.3.self_attn.k_b_proj", "model.norm"):
        assert places_of(module, kind="imatrix.gguf", root="language_model.model.") == ()
    assert places_of("model.layers.3.eh_proj", kind="imatrix.gguf", root="model.") == ()


@pytest.mark.parametrize("block", ["mlp", "feed_forward"])
def test_experts_are_found_wherever_they_stand_in_a_layer(block):
    module = f"layers.03.{block}.experts.17.up_proj"
    assert places_of(module, kind="statistics", root="") == (Place(f"layers.03.{block}.experts.gate_up_proj", 17),)
    assert places_of(module, kind="imatrix.dat", root="")[0] == Place("blk.3.ffn_up_exps", 17)
    for rest in (f"{block}.experts.17.w1", f"{block}.experts.gate_up_proj"):  # of no name, of no number
        assert places_of(f"layers.3.{rest}", kind="statistics", root="") == (Place(f"layers.3.{rest}"),)
        assert places_of(f"layers.3.{rest}", kind="imatrix.gguf", root="") == ()
    assert places_of("lm_head", kind="imatrix.gguf", root="") == (Place("output"),)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1.0])
@pytest.mark.parametrize("kind", ["gguf", "dat", "statistics"])
def test_numbers_that_are_no_moments_are_named(kind, wrong, entries, tmp_path):
    moments, _ = entries[NAME]
    moments[3, 5] = wrong
    path = tmp_path / "file"
    makers = {"gguf": write_gguf, "dat": write_dat, "statistics": lambda *one: write_statistics(*one, model="")}
    found = open_importance(makers[kind](path, entries))
    entry = found.entries[f"{LAYER}.down_proj" if kind == "statistics" else NAME]
    with pytest.raises(SourceError, match="NaN, Inf or less than 0 in row 3") as caught:
        entry.read_row(3, 128)
    assert caught.value.tensor == entry.values.name
    assert entry.read_row(1, 128).min() > 0


def gguf_changes(entries):
    sums, counts = f"{NAME}.weight.in_sum2", f"{NAME}.weight.counts"
    moments = entries[NAME][0]
    return {
        "no counts": ({counts: None}, "do not go together"),
        "no sums": ({sums: None}, "do not go together"),
        "half": ({sums: moments.astype(np.float16)}, "is F16"),
        "integers": ({counts: np.ones((4, 1), np.int32)}, "is I32"),
        "odd": ({counts: np.ones((5, 1), np.float32)}, "do not go with"),
        "too few": ({counts: np.ones((2, 1), np.float32)}, r"\[4, 128\] do not go with counts \[2\]"),
        "counts of two dimensions": ({counts: np.ones((2, 2), np.float32)}, r"do not go with counts \[2, 2\]"),
        "turned": ({sums: np.ascontiguousarray(moments.T)}, r"sums \[128, 4\] do not go with counts \[4\]"),
        "one row": ({sums: moments.reshape(-1)}, r"sums \[512\] do not go with counts \[4\]"),
        "more dimensions": ({sums: moments.reshape(4, 2, 64)}, r"sums \[4, 2, 64\] do not go with"),
        "NaN tokens": ({counts: np.full((4, 1), np.nan, np.float32)}, "no number of tokens"),
        "huge tokens": ({counts: np.full((4, 1), 1e30, np.float32)}, "no number of tokens"),
        "negative tokens": ({counts: np.full((4, 1), -1, np.float32)}, "no number of tokens"),
    }


@pytest.mark.parametrize("case", list(gguf_changes(expert_entries())))
def test_tensors_that_cannot_be_meant_are_named(case, entries, tmp_path):
    changes, words = gguf_changes(entries)[case]
    with pytest.raises(SourceError, match=words) as caught:
        open_importance(write_gguf(tmp_path / "x.gguf", entries, changes=changes))
    assert caught.value.tensor.startswith(NAME)


def test_a_model_in_gguf_is_no_importance_matrix(entries, tmp_path):
    with pytest.raises(SourceError, match="no importance matrix"):
        open_importance(write_gguf(tmp_path / "x.gguf", entries, kind="model"))


def test_a_gguf_cut_anywhere_is_refused(entries, tmp_path):
    whole = write_gguf(tmp_path / "x.gguf", {NAME: entries[NAME]}).read_bytes()
    for length in [*range(0, 600, 7), len(whole) - 1024, len(whole) - 65]:
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(SourceError):
            open_importance(tmp_path / "cut")


def test_a_gguf_that_lies_in_any_of_its_header_bytes_ends_in_an_error_with_a_name_or_reads(entries, tmp_path):
    """Sizes and counts of 2**64 among them: nothing hangs, nothing takes memory, no other exception comes."""
    whole = write_gguf(tmp_path / "x.gguf", {NAME: entries[NAME]}).read_bytes()
    header = whole.index(b"counts") + 40
    refused = 0
    for place in range(4, header):
        for byte in (0xFF, 0x00, 0x09):
            changed = bytearray(whole)
            changed[place] = byte
            (tmp_path / "changed").write_bytes(changed)
            try:
                found = open_importance(tmp_path / "changed")
                for entry in found.entries.values():
                    entry.read_row(0, 1)
            except SourceError:
                refused += 1
    assert refused > header  # of three times as many


def test_a_tensor_that_lies_where_another_does_or_between_is_refused(entries, tmp_path):
    whole = write_gguf(tmp_path / "x.gguf", entries).read_bytes()
    name = b"blk.1.ffn_up_exps.weight.in_sum2"
    place = whole.index(name) + len(name) + 4 + 2 * 8 + 4  # of its offset, behind dimensions and type
    offset = int.from_bytes(whole[place : place + 8], "little")
    for wrong in (0, offset - 4, offset + 4, offset - 32):
        (tmp_path / "x.gguf").write_bytes(whole[:place] + wrong.to_bytes(8, "little") + whole[place + 8 :])
        with pytest.raises(SourceError, match=f"lies at byte {wrong} of the data, where {offset}") as caught:
            open_importance(tmp_path / "x.gguf")
        assert caught.value.tensor == name.decode()


def test_big_endian_is_said_to_be_so(entries, tmp_path):
    from gguf import GGUFEndian, GGUFWriter

    writer = GGUFWriter(tmp_path / "x.gguf", "", endianess=GGUFEndian.BIG)
    writer.add_type("imatrix")
    writer.add_tensor(f"{NAME}.weight.in_sum2", entries[NAME][0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(SourceError, match="is big-endian GGUF"):
        open_importance(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("position", "value", "words"),
    [(8, 1 << 60, "which no importance matrix has"), (16, 1 << 20, "which no importance matrix has")],
)
def test_counts_beyond_reason_are_refused_before_anything_is_made(position, value, words, entries, tmp_path):
    changed = bytearray(write_gguf(tmp_path / "x.gguf", entries).read_bytes())
    changed[position : position + 8] = value.to_bytes(8, "little")
    (tmp_path / "x.gguf").write_bytes(changed)
    with pytest.raises(SourceError, match=words):
        open_importance(tmp_path / "x.gguf")


def test_a_long_array_is_refused_before_it_is_read(entries, tmp_path):
    """Its items would be objects: 2**40 of them, of which the file has none."""
    whole = write_gguf(tmp_path / "x.gguf", entries).read_bytes()
    place = whole.index(b"imatrix.datasets") + len("imatrix.datasets") + 4
    changed = whole[:place] + (0).to_bytes(4, "little") + (1 << 40).to_bytes(8, "little") + whole[place + 12 :]
    (tmp_path / "x.gguf").write_bytes(changed)
    with pytest.raises(SourceError, match="an array of"):
        open_importance(tmp_path / "x.gguf")


def test_a_dat_cut_anywhere_is_refused(entries, tmp_path):
    whole = write_dat(tmp_path / "x.dat", {NAME: entries[NAME]}).read_bytes()
    end_of_entries = len(whole) - 8 - len("calibration.txt")
    for length in [*range(0, 60), *range(end_of_entries - 9, len(whole))]:
        if length == end_of_entries:
            continue  # the form without an ending
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(SourceError):
            open_importance(tmp_path / "cut")


@pytest.mark.parametrize(
    ("position", "value", "words"),
    [
        (0, 0, "is no statistics file, imatrix.gguf or imatrix.dat"),
        (0, -1, "is no statistics file"),
        (0, 1 << 30, "is no statistics file"),
        (0, 5, "is truncated|a name of|counts|claims"),
        (4, -1, "a name of"),
        (4, 1 << 30, "a name of"),
        (34, -1, "counts -1 calls"),
        (38, 0, "counts 2 calls and 0 values"),
        (38, -5, "counts 2 calls and -5"),
        (38, 1 << 30, "claims 1073741824 values"),
    ],
)
def test_numbers_of_a_dat_that_cannot_be_meant(position, value, words, entries, tmp_path):
    changed = bytearray(write_dat(tmp_path / "x.dat", {NAME: entries[NAME]}).read_bytes())
    assert changed[8:34] == f"{NAME}.weight".encode()
    changed[position : position + 4] = value.to_bytes(4, "little", signed=True)
    (tmp_path / "x.dat").write_bytes(changed)
    with pytest.raises(SourceError, match=words):
        open_importance(tmp_path / "x.dat")


def test_a_name_twice_and_bytes_behind_the_end_are_refused(entries, tmp_path):
    whole = write_dat(tmp_path / "x.dat", {NAME: entries[NAME]}, ending=False).read_bytes()
    (tmp_path / "twice").write_bytes((2).to_bytes(4, "little") + whole[4:] * 2)
    with pytest.raises(SourceError, match="stands twice"):
        open_importance(tmp_path / "twice")
    (tmp_path / "more").write_bytes(whole + bytes(11))
    with pytest.raises(SourceError, match="bytes behind its last entry"):
        open_importance(tmp_path / "more")


def test_statistics_that_do_not_fit_together_are_named(entries, tmp_path):
    path = write_statistics(tmp_path / "s.safetensors", entries, model="abc")
    tensors, metadata = load_file(path), {"quantkit_statistics": "1", "model": "abc"}
    name = f"{LAYER}.down_proj.input_second_moment"
    for change, words in (
        ({name: tensors[name].astype(np.int64)}, "not F32"),
        ({name: tensors[name][None]}, "not F32"),
        ({f"{LAYER}.token_count": np.ones(3, np.int64)}, "not by 4 I64"),
        ({f"{LAYER}.token_count": np.ones(4, np.float32)}, "not by 4 I64"),
    ):
        save_file(tensors | change, path, metadata)
        with pytest.raises(SourceError, match=words):
            open_importance(path)
    del tensors[f"{LAYER}.token_count"]
    save_file(tensors, path, metadata)
    with pytest.raises(SourceError, match=re.escape("stands without")):
        open_importance(path)


def test_what_is_no_file_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "nosuch"):
        with pytest.raises(SourceError, match="is not a file"):
            open_importance(path)
    (tmp_path / "empty").touch()
    with pytest.raises(SourceError, match="is truncated"):
        open_importance(tmp_path / "empty")


def test_a_text_is_no_importance_matrix(tmp_path):
    (tmp_path / "prose.txt").write_text("Some prose, and no numbers.\n" * 20)
    with pytest.raises(SourceError, match="is a text, and no importance matrix") as caught:
        open_importance(tmp_path / "prose.txt")
    assert caught.value.remedy.startswith("name statistics of quantkit calibrate")


def test_only_a_gguf_needs_the_gguf_package(entries, tmp_path, monkeypatch):
    write_dat(tmp_path / "x.dat", entries)
    write_gguf(tmp_path / "x.gguf", entries)
    monkeypatch.setitem(sys.modules, "gguf", None)
    open_importance(tmp_path / "x.dat")
    with pytest.raises(UsageError, match="needs gguf") as caught:
        open_importance(tmp_path / "x.gguf")
    assert "pip install '.[imatrix]'" in caught.value.remedy
    program = "import sys, quantkit.importance.open; assert not {'gguf', 'torch'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
