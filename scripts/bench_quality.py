#!/usr/bin/env python
"""What INT4 does to a small model, method by method: divergence, perplexity, error of the weights.

A SOURCE comes from train_tiny_glm.py or smollm2.py: an FP8 block checkpoint with tokens of two texts. Statistics are
taken from one, everything is measured on the other. The reference is the model with the values of the FP8 weights;
every model runs in transformers, in FP32, and its weights are decoded by compressed-tensors and torch.

KL is the mean over tokens of the divergence from the reference, in nats; +- is the standard error over the windows of
text. A ratio is of the same windows, so that its error is small. Several sources of one kind (other seeds) are put
together at the end, with the standard error over them.

    scripts/bench_quality.py /tmp/glm-tiny /tmp/smollm2 --json figures.json
    scripts/bench_quality.py /tmp/glm-tiny --group-size 32 --methods absmax search
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from scripts.quality_figures import Figures, Reference, ratio_of, standard_error
from scripts.quality_methods import METHODS, TARGETS, Job, write_dense

GROUP_SIZES = {"glm_moe_dsa": (32, 128), "llama": (32, 64)}  # 576 columns are no whole groups of 128
RATIOS = (
    ("search", "absmax"),
    ("search", "llm-compressor minmax"),
    ("search", "llm-compressor mse"),
    ("search + importance", "search"),
    ("GPTQ", "llm-compressor GPTQ"),
)


def measure(source: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One document for each scope and group size."""
    config = json.loads((source / "config.json").read_text())
    model_type = config["model_type"]
    reference = Reference.of(source, options.windows)
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        dense = Path(work) / "dense"
        write_dense(source, dense)
        for (known, scope), targets in TARGETS.items():
            if known != model_type or scope not in options.scope:
                continue
            for group_size in options.group_size or GROUP_SIZES[model_type]:
                found: dict[str, Figures] = {}
                for name in options.methods:
                    output = Path(work) / f"{scope}-{group_size}-{name.replace(' ', '-')}"
                    job = Job(source=source, dense=dense, output=output, group_size=group_size, targets=targets)
                    METHODS[name](job)
                    found[name] = reference.compare(output)
                    print(f"... {source.name} {scope} g{group_size} {name}", file=sys.stderr, flush=True)
                yield document_of(source, model_type, scope, group_size, found)


def document_of(
    source: Path, model_type: str, scope: str, group_size: int, found: dict[str, Figures]
) -> dict[str, Any]:
    ratios = {}
    for first, second in RATIOS:
        if {first, second} <= found.keys():
            ratio, error = ratio_of(found[first].divergence, found[second].divergence)
            ratios[f"{first} / {second}"] = {"ratio": ratio, "standard_error": error}
    methods = {name: figures.document() for name, figures in found.items()}
    return {
        "source": source.name,
        "model_type": model_type,
        "scope": scope,
        "group_size": group_size,
        "methods": methods,
        "kl_ratios": ratios,
    }


def print_table(document: dict[str, Any]) -> None:
    print(f"\n{document['source']}, {document['scope']}, groups of {document['group_size']}\n")
    print("| method | KL | +- | p99 | same top | perplexity | weight error |\n|---|---:|---:|---:|---:|---:|---:|")
    for name, row in document["methods"].items():
        print(
            f"| {name} | {row['kl']:.5f} | {row['kl_standard_error']:.5f} | {row['p99']:.4f} | {row['same_top']:.4f} "
            f"| x{row['perplexity_ratio']:.4f} | {row['weight_error']:.4f} |"
        )
    print()
    for name, row in document["kl_ratios"].items():
        print(f"KL of {name}: {row['ratio']:.3f} +- {row['standard_error']:.3f}")
    sys.stdout.flush()


def print_together(documents: list[dict[str, Any]]) -> None:
    """Ratios over sources of one kind, where there are several."""
    alike: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for document in documents:
        alike.setdefault((document["model_type"], document["scope"], document["group_size"]), []).append(document)
    for (model_type, scope, group_size), those in alike.items():
        if len(those) > 1:
            print(f"\n{len(those)} sources of {model_type}, {scope}, groups of {group_size}\n")
            for name in those[0]["kl_ratios"]:
                ratios = torch.tensor([one["kl_ratios"][name]["ratio"] for one in those])
                print(f"KL of {name}: {ratios.mean():.3f} +- {standard_error(ratios):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, nargs="+", metavar="SOURCE")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, metavar="METHOD")
    parser.add_argument("--group-size", type=int, nargs="+", help="[32 and 128; 32 and 64 of SmolLM2]")
    parser.add_argument("--scope", nargs="+", default=["experts", "linears"], choices=["experts", "linears"])
    parser.add_argument("--windows", type=int, help="measure on the first of them only")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, help="where outputs are made and removed [the system's temporary folder]")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.work:
        options.work.mkdir(parents=True, exist_ok=True)
    documents: list[dict[str, Any]] = []
    for source in options.sources:
        for document in measure(source, options):
            documents.append(document)
            print_table(document)
            if options.json:  # after each: a run of an hour may be stopped
                options.json.write_text(json.dumps(documents, indent=2))
    print_together(documents)


if __name__ == "__main__":
    main()
