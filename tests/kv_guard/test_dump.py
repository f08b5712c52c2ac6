"""A dumped pool says what the guard would have said; a damaged dump is a named error."""

import json
import struct
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.errors import SourceError, UsageError
from quantkit.kv_guard.dispatch import SPOILED, twins
from quantkit.kv_guard.dump import Dump, digest_of, write_dump
from quantkit.kv_guard.dump_reader import read_dump
from quantkit.kv_guard.dump_report import check_dump
from quantkit.kv_guard.faults import Fault
from tests.kv_guard.pools import IDENTITY, Pool, numbers


@pytest.fixture
def pool():
    pool = Pool()
    pool.begin(0, range(10), [3, 4, 5], request="alpha")
    pool.begin(2, range(50, 57), [6, 9], request="beta")
    return pool


def written(pool, path, rows=(0, 2), firsts=None, **how):
    return write_dump(path, Dump.of(pool.tracker, replace(pool.step(*rows), firsts=firsts)), **how)


def test_a_sound_pool_is_read_back(pool, tmp_path):
    dump = read_dump(written(pool, tmp_path / "pool.safetensors"))
    assert (dump.identity, dump.size, dict(dump.names)) == (
        IDENTITY,
        pool.tracker.settings.size,
        {0: "alpha", 2: "beta"},
    )
    report = check_dump(dump)
    assert (report.num_held, report.num_free, report.num_checked, report.is_sound) == (5, 11, 5, True)


def test_what_is_wrong_is_named_with_its_request(pool, tmp_path):
    pool.tracker.release(numbers(4))
    pool.tracker.tags.seals_P[9] ^= 1 << 17
    report = check_dump(read_dump(written(pool, tmp_path / "pool.safetensors")))
    found = [(one.fault, one.request, one.evidence.page) for one in report.violations]
    assert found == [(Fault.FREED, "alpha", 4), (Fault.TORN, "beta", 9)]
    assert (report.torn, report.stray) == ((9,), ())
    assert not report.is_sound


def test_a_page_that_no_row_expects_is_a_leak(pool, tmp_path):
    pool.tracker.close(2)
    report = check_dump(read_dump(written(pool, tmp_path / "pool.safetensors", rows=(0,))))
    assert (report.stray, report.is_sound) == ((6, 9), True)


def test_states_of_pages_are_told_apart(pool, tmp_path):
    """Held, shared, a transfer's, reserved for a copy, spoiled: none of them is torn."""
    tracker = pool.tracker
    tracker.cache(numbers(3), numbers(0), numbers(0))
    tracker.announce(numbers(4), 9)
    tracker.reserve(numbers(12), 9)
    tracker.tags.seals_P[9] = SPOILED ^ twins.mark_of(numbers(9))[0]
    report = check_dump(read_dump(written(pool, tmp_path / "pool.safetensors")))
    assert (report.num_held, report.num_awaiting, report.num_shared, report.num_free) == (5, 2, 1, 10)
    assert (report.torn, report.spoiled, report.stray) == ((), (9,), ())
    found = [(one.fault, one.request) for one in report.violations]
    assert found == [(Fault.NOT_ARRIVED, "alpha"), (Fault.SPOILED, "beta")]
    tracker.tags.states_P[14] = 7
    assert check_dump(read_dump(written(pool, tmp_path / "other.safetensors"))).torn == (14,)


@pytest.mark.parametrize(("firsts", "faults"), [(None, []), (numbers(0), [Fault.NEVER_GRANTED])])
def test_null_pages_of_a_dump_are_padding_as_they_were_in_its_step(firsts, faults, tmp_path):
    pool = Pool(null_page=0)
    pool.begin(0, range(8), [3, 4])
    pool.tracker.prune(numbers(0), numbers(1))
    pool.table[0, 0] = 0
    report = check_dump(read_dump(written(pool, tmp_path / "pool.safetensors", (0,), firsts)))
    assert [one.fault for one in report.violations] == faults


def test_nothing_is_overwritten(pool, tmp_path):
    path = written(pool, tmp_path / "pool.safetensors")
    with pytest.raises(UsageError, match="exists already"):
        written(pool, path)


def test_the_next_incident_has_a_dump_of_its_own(pool, tmp_path):
    path = tmp_path / "pool.rank0.safetensors"
    names = [written(pool, path, is_numbered=True).name for _ in range(3)]
    assert names == [f"pool.rank0{number}.safetensors" for number in ("", ".2", ".3")]
    for number in range(4, 101):
        (tmp_path / f"pool.rank0.{number}.safetensors").touch()
    with pytest.raises(UsageError, match="and so do 99 more"):
        written(pool, path, is_numbered=True)
    assert check_dump(read_dump(tmp_path / names[1])).is_sound


def test_a_dump_that_fails_leaves_no_file(pool, tmp_path):
    path = tmp_path / "pool.safetensors"
    with pytest.raises(AttributeError):
        written(pool, path, firsts="no tensor")
    assert not path.exists()


def header_of(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length])["__metadata__"]


def damaged(path, change, *, is_signed=True):
    """``is_signed``: as who writes dumps would, so that it is not the digest which tells."""
    tensors, metadata = load_file(path), header_of(path)
    change(tensors, metadata)
    if is_signed:
        metadata["sha256"] = digest_of(tensors, metadata["pool"])
    save_file(tensors, path, metadata=metadata)


def with_size(name, value):
    def change(tensors, metadata):
        document = json.loads(metadata["pool"])
        document["size"][name] = value
        metadata["pool"] = json.dumps(document)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors, metadata: metadata.pop("format"), "is no dump"),
        (lambda tensors, metadata: metadata.update(version="99"), "version 99, this is 1"),
        (lambda tensors, metadata: metadata.update(pool="{"), "a part of it is missing"),
        (lambda tensors, metadata: metadata.update(pool='{"identity": {}}'), "a part of it is missing"),
        (lambda tensors, metadata: tensors.pop("records"), "a part of it is missing or is another: 'records'"),
        (lambda tensors, metadata: tensors.update(seals=tensors["seals"][:3].clone()), "seals is torch.int64 (3,)"),
        (lambda tensors, metadata: tensors.update(states=tensors["states"].float()), "states is torch.float32"),
        (lambda tensors, metadata: tensors["rows"].fill_(77), "rows or lengths that the pool does not have"),
        (lambda tensors, metadata: tensors["lengths"].fill_(1 << 40), "rows or lengths that the pool does not have"),
        (with_size("num_pages", 17), "seals is torch.int64 (16,), not torch.int64 (17,)"),
        (with_size("page_size", 0), "size.page_size is 0"),
        (with_size("page_size", "4"), "size.page_size is '4'"),
        (with_size("page_size", 1 << 62), f"size.page_size is {1 << 62}"),
        (with_size("null_page", 1 << 70), f"size.null_page is {1 << 70}"),
        (with_size("null_page", -2), "size.null_page is -2"),
        (lambda tensors, metadata: metadata.update(pool="[" * 100_000), "a part of it is missing or is another"),
        (lambda tensors, metadata: tensors.update(table=tensors["table"][0, 0].clone()), "table is ()"),
        (lambda tensors, metadata: tensors.update(table=tensors["table"][:, :0].clone()), "table is (4, 0)"),
        (lambda tensors, metadata: tensors["lengths"].fill_((1 << 63) - 1), "rows or lengths that the pool does not"),
        (lambda tensors, metadata: tensors.update(rows=torch.zeros(5, dtype=torch.int64)), "rows is torch.int64 (5,)"),
        (with_size("most_pages", 3), "expected_seals is torch.int64 (4, 4), not torch.int64 (4, 3)"),
    ],
)
def test_a_changed_dump_is_refused(change, words, pool, tmp_path):
    path = written(pool, tmp_path / "pool.safetensors")
    damaged(path, change)
    with pytest.raises(SourceError) as caught:
        read_dump(path)
    assert words in str(caught.value)
    assert "pool.safetensors" in str(caught.value)
    assert caught.value.remedy


def test_every_bit_of_a_dump_counts(pool, tmp_path):
    data = bytearray(written(pool, tmp_path / "pool.safetensors").read_bytes())
    path = tmp_path / "flipped.safetensors"
    for at in range(0, len(data), 5):
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        with pytest.raises(SourceError):
            read_dump(path)
        data[at] ^= 1 << at % 8
    path.write_bytes(data)
    assert check_dump(read_dump(path)).is_sound


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors, metadata: tensors["seals"][:1].bitwise_xor_(1 << 40), "is damaged"),
        (with_size("page_size", 8), "is damaged"),
        (lambda tensors, metadata: metadata.pop("sha256"), "a part of it is missing or is another: 'sha256'"),
    ],
)
def test_a_dump_is_what_was_written(change, words, pool, tmp_path):
    path = written(pool, tmp_path / "pool.safetensors")
    damaged(path, change, is_signed=False)
    with pytest.raises(SourceError) as caught:
        read_dump(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, b"\xff" * 16])
def test_what_is_no_dump_is_refused(content, tmp_path):
    path = tmp_path / "pool.safetensors"
    path.write_bytes(content)
    with pytest.raises(SourceError, match="cannot be read"):
        read_dump(path)
    with pytest.raises(SourceError, match="is no file"):
        read_dump(tmp_path)


def test_a_cut_dump_is_refused(pool, tmp_path):
    path = written(pool, tmp_path / "pool.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SourceError, match="cannot be read"):
        read_dump(path)


def test_a_table_by_token_is_read_back(tmp_path):
    pool = Pool()
    pool.begin(0, range(6), [3, 5])
    by_page = pool.table
    pool.table = (by_page[:, :, None] * 4 + torch.arange(4, dtype=torch.int32)).reshape(4, 16)
    pool.by_token = True
    assert check_dump(read_dump(written(pool, tmp_path / "pool.safetensors", rows=(0,)))).is_sound
