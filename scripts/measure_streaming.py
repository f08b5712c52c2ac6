#!/usr/bin/env python
"""Measure what `quantkit evaluate` takes at GLM-5.2's real dimensions: memory and time, in a process of its own.

Makes a checkpoint of a few layers with random FP8 blocks and its INT4 conversion, evaluates one against the other over
random tokens, prints the peaks that the kernel counted, and removes everything.

    scripts/measure_streaming.py /tmp/streaming
    scripts/measure_streaming.py /tmp/streaming --layers 1 --experts 8 --vocab 4096 --sequences 1 --length 64
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from quantkit.checkpoint.writer import ShardWriter, order_tensors
from quantkit.tensors import I64, TensorSpec
from scripts.make_checkpoint import REAL, glm_config, make_checkpoint

_COMMAND = [sys.executable, "-c", "from quantkit.cli.app import main; main()"]
_LOOK_SECONDS = 0.05


def write_tokens(path: Path, *, num_sequences: int, length: int, vocabulary: int) -> None:
    """Random ids, the same each time."""
    ids = np.random.default_rng(0).integers(vocabulary, size=(num_sequences, length), dtype=np.int64)
    writer = ShardWriter(path, order_tensors({"input_ids": TensorSpec(I64, ids.shape)}))
    writer.write("input_ids", ids)
    writer.close()


def measured(command: list[str]) -> dict[str, float]:
    """Seconds, and in bytes the peak resident set with files (VmHWM) and the largest without (RssAnon)."""
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    status = Path(f"/proc/{process.pid}/status")
    peaks = {"VmHWM": 0, "RssAnon": 0}
    while process.poll() is None:
        try:
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        except OSError:
            break
        now = {key: int(lines.get(key, "0").split()[0]) << 10 for key in peaks}
        peaks = {key: max(peaks[key], now[key]) for key in peaks}
        time.sleep(_LOOK_SECONDS)
    stdout, stderr = process.communicate()
    if process.returncode:
        sys.exit(stderr)
    document = json.loads(stdout)
    print(f"  KL divergence {document['kl_divergence']['mean']:.3g}, top-1 agreement {document['top1_agreement']:.3f}")
    return {"seconds": time.monotonic() - start, **peaks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="for the checkpoints; must not exist, is removed")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=REAL["vocab_size"])
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--work", action="store_true", help="hidden states in files")
    parser.add_argument("--fast", action="store_true", help="without the errors of weights")
    arguments = parser.parse_args()
    if arguments.directory.exists():
        parser.error(f"{arguments.directory} exists already")
    source, output, tokens = (arguments.directory / name for name in ("source", "output", "ids.safetensors"))
    arguments.directory.mkdir(parents=True)
    try:
        sizes = REAL | {"vocab_size": arguments.vocab}
        config = glm_config(sizes, experts=arguments.experts, layers=arguments.layers, dense_layers=0, mtp=False)
        make_checkpoint(source, config, num_shards=4)
        write_tokens(tokens, num_sequences=arguments.sequences, length=arguments.length, vocabulary=arguments.vocab)
        convert = [*_COMMAND, "convert", str(source), "--to", "int4", "-o", str(output), "-q"]
        subprocess.run(convert, check=True, stdout=subprocess.DEVNULL)
        evaluate = [*_COMMAND, "evaluate", str(source), str(output), "--tokens", str(tokens), "--json", "-q"]
        evaluate += ["--dtype", arguments.dtype, *(["--work", str(arguments.directory)] if arguments.work else [])]
        evaluate += ["--fast"] if arguments.fast else []
        found = measured(evaluate)
        print(
            f"  {found['seconds']:.1f} s, peak resident {found['VmHWM'] / 1e9:.2f} GB, "
            f"of it not of files {found['RssAnon'] / 1e9:.2f} GB ({os.cpu_count()} cores)"
        )
    finally:
        shutil.rmtree(arguments.directory)


if __name__ == "__main__":
    main()
