"""sha256 of everything in a small conversion: a change of these bytes is a change of the product."""

import hashlib
import tempfile
from pathlib import Path
from typing import Any

from scripts.make_checkpoint import SMALL, glm_config, make_checkpoint
from tests.convert.helpers import convert

GOLDEN = Path(__file__).parent / "outputs.json"
CASES: dict[str, dict[str, Any]] = {
    "search-g32": {},
    "search-g64-positive": {"group_size": 64, "signed_scales": False},
    "search-g128": {"group_size": 128},
    "absmax-g32": {"scales": "absmax"},
    "w4afp8": {"layout": "w4afp8"},
    "fp8-g32": {"rest": "fp8"},
    "native-fp8-g32": {"rest": "fp8-native", "engine": "sglang"},
    "zero-points-g32": {"zero_points": True, "engine": "vllm"},
    "w4a8": {"activations": "fp8-dynamic"},
}


def output_digests() -> dict[str, dict[str, str]]:
    """Case to file name to sha256, the source's own files as the case ``source``."""
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        config = glm_config(SMALL, experts=2, layers=2, dense_layers=1, mtp=True)
        make_checkpoint(source, config, num_shards=2, seed=7)
        digests = {"source": _digests(source)}
        for case, changes in CASES.items():
            convert(source, Path(name) / case, **changes)
            digests[case] = _digests(Path(name) / case)
    return digests


def _digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}
