#!/usr/bin/env python
"""Writes the golden digests of small conversions anew. Commit the result alone, and say why the bytes changed."""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from tests.golden.outputs import GOLDEN, output_digests

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    GOLDEN.write_text(json.dumps(output_digests(), indent=1) + "\n")
