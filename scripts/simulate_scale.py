#!/usr/bin/env python
"""A conversion of a terabyte on paper: the real planner and scheduler, with modelled disks, networks and cores.

Headers are real files (sparse ones); their shards are planned as ever, in a process of its own whose time and memory
are measured here. Then the scheduler runs on a simulated clock: every task, flush, hash and download costs what the
rates below say. Prints a table; ``--check`` fails where planning takes more than 10 s or 1 GB, or where a machine loses
more than 5 % of its time to stragglers, of which what no scheduler can divide among several nodes does not count.

    scripts/simulate_scale.py [--only k2] [--check]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from simulated_clock import Clock, patched
from simulated_work import GIB, Machines, costs, spool_of

from quantkit.checkpoint.header import encode_header
from quantkit.checkpoint.source import open_checkpoint
from quantkit.convert.local import Share, execute
from quantkit.convert.ranks import shares
from quantkit.families import FAMILIES, family_of
from quantkit.machine import uncollected
from quantkit.plan.make import make_plan
from quantkit.plan.plan import Plan
from quantkit.recipe import default_recipe
from quantkit.tensors import BF16, TensorSpec
from quantkit.weights.source_form import source_form
from quantkit.weights.stored import stored_specs

MOST_PLAN_SECONDS, MOST_PLAN_BYTES, MOST_LOST = 10.0, 1e9, 0.05
_DECODER = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_shared_experts": 1,
    "vocab_size": 163_840,
    "attention_bias": False,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
# what is published of the two: layers, experts, widths, tensors and shards. K3 is stored in MXFP4; here it is a model
# of its size in FP8, in the shapes of its experts, with as many tensors
MODELS: dict[str, dict[str, Any]] = {
    "k2": {
        "num_hidden_layers": 61,
        "n_routed_experts": 384,
        "hidden_size": 7168,
        "moe_intermediate_size": 2048,
        "intermediate_size": 18_432,
        "num_shards": 61,
        "num_tensors": 139_583,
    },
    "k3": {
        "num_hidden_layers": 93,
        "n_routed_experts": 896,
        "hidden_size": 3584,
        "moe_intermediate_size": 3072,
        "intermediate_size": 33_792,
        "num_shards": 180,
        "num_tensors": 497_220,
    },
}


LAPTOP = Machines(title="laptop, 12 cores, from the hub at 1 Gbit/s", nodes=1, cores=12, disk=2e9, network=0.117e9)
NODE = Machines(title="8-GPU node, 64 workers, from its disks", nodes=1, cores=64, disk=12e9, network=0)
FROM_HUB = Machines(
    title="8-GPU node, 64 workers, from the hub at 25 Gbit/s, --spool-gib 200",
    nodes=1,
    cores=64,
    disk=12e9,
    network=2.9e9,
    spool_gib=200,
)
SMALL_NODES = Machines(title="8 nodes of 8 workers, shared disk", nodes=8, cores=8, disk=2e9, network=0)
LARGE_NODES = Machines(title="8 nodes of 64 workers, shared disk", nodes=8, cores=64, disk=8e9, network=0)
MACHINES = (LAPTOP, NODE, FROM_HUB, SMALL_NODES, LARGE_NODES)


def write_headers(name: str, directory: Path) -> None:
    """Sparse shards with real headers, the tensors dealt out in order as published checkpoints are."""
    facts = MODELS[name]
    config: dict[str, Any] = {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], **_DECODER}
    config |= {key: value for key, value in facts.items() if not key.startswith("num_shards") and key != "num_tensors"}
    family = FAMILIES["deepseek_v3"]
    specs = dict(stored_specs(family.assumed_tensors(config), source_form(config["quantization_config"])))
    for number in range(facts["num_tensors"] - len(specs)):  # what the family does not have: norms and gates, mostly
        specs[f"model.extra.{number}.bias"] = TensorSpec(BF16, (facts["hidden_size"],))
    assert len(specs) == facts["num_tensors"], len(specs)
    share = sum(spec.num_bytes for spec in specs.values()) / facts["num_shards"]
    shards: list[dict[str, TensorSpec]] = [{} for _ in range(facts["num_shards"])]
    position = 0
    for tensor, spec in specs.items():
        shards[min(int(position / share), len(shards) - 1)][tensor] = spec
        position += spec.num_bytes
    weight_map: dict[str, str] = {}
    directory.mkdir()
    for number, shard in enumerate(shards, 1):
        path = directory / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header = encode_header(shard, {"format": "pt"})
        path.write_bytes(header)
        os.truncate(path, len(header) + sum(spec.num_bytes for spec in shard.values()))
        weight_map |= dict.fromkeys(shard, path.name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(config))


def plan_of(directory: Path) -> Plan:
    """As the command makes it."""
    with uncollected():
        return _plan_of(directory)


def _plan_of(directory: Path) -> Plan:
    checkpoint = open_checkpoint(directory)
    family = family_of(checkpoint.config)
    return make_plan(default_recipe(family.name, has_experts=True), family, checkpoint)


def measure_plan(directory: Path) -> tuple[float, int]:
    """Seconds and peak bytes of planning, in a process of its own; its start is not counted."""
    program = (
        "import sys, time; sys.path.insert(0, 'scripts')\n"
        "from simulate_scale import plan_of; from pathlib import Path\n"
        f"start = time.monotonic(); plan_of(Path({str(directory)!r})); seconds = time.monotonic() - start\n"
        "peak = open('/proc/self/status').read().split('VmHWM:')[1].split()[0]; print(seconds, peak)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    seconds, peak = ran.stdout.split()
    return float(seconds), int(peak) << 10


def simulate(plan: Plan, machines: Machines) -> tuple[float, float, float]:
    """Seconds until the last node is done, those that perfect balance would take, and the spool's high-water GiB."""
    seconds, ideal, most_spooled = [], 0.0, 0.0
    for share in shares(plan, machines.nodes):
        clock, spool = Clock(), None
        if machines.network:
            spool = spool_of(plan, machines, clock)
        with patched(clock, costs(plan, machines, clock)):
            execute(plan, Share(directory=Path("/nowhere"), spool=spool, only=share), num_jobs=machines.cores)
        seconds.append(clock.now)
        needed = [clock.spent.get(resource, 0.0) for resource in ("read", "write", "network")]
        ideal += max(clock.spent.get("core", 0.0) / machines.cores, *needed)
        most_spooled = max(most_spooled, spool.most_booked / GIB if spool is not None else 0.0)
    return max(seconds), ideal / machines.nodes, most_spooled


def indivisible(plan: Plan, num_nodes: int) -> float:
    """What is lost with any scheduler, as no shard has two writers: 61 over 8 nodes are 8 rounds instead of 7.6."""
    of = {shard.name: shard.file_bytes for shard in plan.checkpoint.shards}
    heaviest = max(sum(of[name] for name in share) for share in shares(plan, num_nodes))
    return heaviest * num_nodes / sum(of.values()) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, help="one model")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound is missed")
    options = parser.parse_args()
    is_good = True
    for name in [options.only] if options.only else MODELS:
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder) / name
            write_headers(name, directory)
            plan_seconds, plan_bytes = measure_plan(directory)
            plan = plan_of(directory)
            facts = plan.checkpoint
            print(
                f"\n{name}: {len(facts.tensors):,} tensors, {len(facts.shards)} shards, {facts.num_bytes / 1e12:.2f} TB"
            )
            print(f"  planned in {plan_seconds:.1f} s with {plan_bytes / 1e9:.2f} GB")
            is_good &= plan_seconds <= MOST_PLAN_SECONDS and plan_bytes <= MOST_PLAN_BYTES
            for machines in MACHINES:
                began = time.monotonic()
                seconds, ideal, spooled = simulate(plan, machines)
                lost = seconds / ideal - 1
                least = indivisible(plan, machines.nodes) if machines.nodes > 1 else 0.0
                is_good &= lost - least <= MOST_LOST
                floor = f" ({least:.1%} at least)" if least else ""
                spool = f", spool at most {spooled:.1f} GiB" if spooled else ""
                print(
                    f"  {machines.title}: {seconds / 60:.1f} min, {lost:.1%} lost to stragglers{floor}{spool} "
                    f"(simulated in {time.monotonic() - began:.0f} s)",
                    flush=True,
                )
    sys.exit(0 if is_good or not options.check else 1)


if __name__ == "__main__":
    main()
