"""Output bytes never change by accident."""

import json

from tests.golden.outputs import GOLDEN, output_digests


def test_output_bytes_are_golden():
    assert output_digests() == json.loads(GOLDEN.read_text())
