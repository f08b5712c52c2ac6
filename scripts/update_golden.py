#!/usr/bin/env python
"""Writes the golden digests of small conversions anew. Commit the result alone, and say why the bytes changed."""

import json

from tests.golden.outputs import GOLDEN, output_digests

if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(output_digests(), indent=1) + "\n")
