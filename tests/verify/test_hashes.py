"""Files against the hashes that a manifest names."""

import time

import pytest

from quantkit.integrity.manifest import FileRecord, record_of
from quantkit.verify.hashes import check_hashes
from quantkit.verify.report import Finding

WRONG = Finding(check="files", message="is another", remedy="look at it", is_error=False)


def check(directory, records, report_progress=lambda *_: None):
    return check_hashes(directory, records, wrong=WRONG, num_jobs=2, report_progress=report_progress)


@pytest.mark.parametrize("content", [b"other text", b"text and more", b""])
def test_what_is_not_as_recorded_is_found(content, tmp_path):
    for name in ("good", "bad"):
        (tmp_path / name).write_bytes(b"some bytes")
    records = {name: record_of(tmp_path / name) for name in ("good", "bad")}
    assert check(tmp_path, {**records, "gone": records["good"]}) == []
    (tmp_path / "bad").write_bytes(content)
    (finding,) = check(tmp_path, records)
    assert (finding.file, finding.message, finding.remedy, finding.is_error) == (
        "bad",
        "is another",
        "look at it",
        False,
    )


@pytest.mark.parametrize("content", [b"", b"bytes"])
def test_a_record_without_a_hash_is_met_by_no_file(content, tmp_path):
    (tmp_path / "shard").write_bytes(content)
    assert [one.file for one in check(tmp_path, {"shard": FileRecord(file_bytes=0, sha256="")})] == ["shard"]


def test_an_interrupted_check_reads_no_file_to_its_end(tmp_path):
    (tmp_path / "small").write_bytes(b"a")
    with (tmp_path / "large").open("wb") as stream:
        stream.truncate(1 << 40)  # takes no room, and some ten minutes to hash
    records = {
        "small": FileRecord(file_bytes=1, sha256=""),
        "large": FileRecord(file_bytes=1 << 40, sha256=""),
    }

    def interrupt(_, done):
        if done == records["small"].file_bytes:
            raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        check(tmp_path, records, interrupt)
    assert time.monotonic() - started < 5
