"""Files, index, headers and config of an output, without looking at the numbers."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from quantkit.checkpoint.file_names import CONFIG_NAME, INDEX_NAME, MANIFEST_NAME
from quantkit.checkpoint.json_files import MOST_INDEX_BYTES, read_json
from quantkit.checkpoint.source import Checkpoint, open_checkpoint
from quantkit.errors import QuantkitError
from quantkit.families import FAMILIES, Family
from quantkit.integrity.manifest import FileRecord
from quantkit.plan.plan import Plan
from quantkit.verify.config_contract import check_config
from quantkit.verify.report import Finding
from quantkit.weights.binding import bind_checkpoint
from quantkit.weights.completeness import check_complete
from quantkit.weights.stored_kv_scales import stored_kv_scales


def check_files(directory: Path, records: Mapping[str, FileRecord]) -> Iterator[Finding]:
    """Every recorded file is there with its length, and nothing else is."""
    for name, record in records.items():
        path = directory / name
        if not path.is_file():
            yield Finding(check="files", message="is missing", file=name)
        elif path.stat().st_size != record.file_bytes:
            message = f"has {path.stat().st_size} bytes, the manifest says {record.file_bytes}"
            yield Finding(check="files", message=message, file=name)
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name not in records and name != MANIFEST_NAME:
            is_needed = name.endswith(".safetensors") or name in (CONFIG_NAME, INDEX_NAME)
            yield Finding(check="files", message="is not named by the manifest", is_error=is_needed, file=name)


def check_structure(directory: Path, plan: Plan) -> Iterator[Finding]:
    """A written directory against the plan that it was written from, and against its own config."""
    checkpoint, findings = open_output(directory)
    yield from findings
    if checkpoint is not None:
        yield from check_specs(checkpoint, plan)
        yield from check_contract(
            checkpoint,
            FAMILIES[plan.family],
            allow_incomplete=plan.is_incomplete,
            is_partial=plan.partial is not None,
        )


def open_output(directory: Path) -> tuple[Checkpoint | None, list[Finding]]:
    """Catalogue of an output: index and headers both ways, shard lengths, ``total_size``."""
    try:
        checkpoint = open_checkpoint(directory)
        index = read_json(directory / INDEX_NAME, what="convert again", most_bytes=MOST_INDEX_BYTES)
    except QuantkitError as error:
        return None, [Finding.of("index and headers", error)]
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    if total != checkpoint.num_bytes:
        message = f"total_size is {total}, the tensors have {checkpoint.num_bytes} bytes"
        return checkpoint, [Finding(check="index and headers", message=message, file=INDEX_NAME)]
    return checkpoint, []


def check_specs(checkpoint: Checkpoint, plan: Plan) -> Iterator[Finding]:
    """Every planned tensor is there with its dtype, shape and shard, and no other."""
    planned = {name: (shard.name, spec) for shard in plan.shards for name, spec in shard.specs.items()}
    for name, (shard_name, spec) in planned.items():
        stored = checkpoint.tensors.get(name)
        if stored is None:
            yield Finding(check="tensors", message="is missing", tensor=name, file=shard_name)
        elif stored.spec != spec or stored.path.name != shard_name:
            yield Finding(
                check="tensors",
                message=f"is {stored.spec} in {stored.path.name}, not {spec} in {shard_name}",
                tensor=name,
            )
    for name, stored in checkpoint.tensors.items():
        if name not in planned:
            yield Finding(check="tensors", message="is not part of the plan", tensor=name, file=stored.path.name)
    for key in sorted(plan.config.keys() | checkpoint.config.keys()):
        if plan.config.get(key) != checkpoint.config.get(key):
            yield Finding(check="tensors", message=f"{key} is not what the conversion writes", file=CONFIG_NAME)


def check_contract(
    checkpoint: Checkpoint, family: Family, *, allow_incomplete: bool, is_partial: bool = False
) -> Iterator[Finding]:
    """Every weight that the family expects is there, the config says of each how it is stored, KV scales are scales."""
    try:
        binding = bind_checkpoint(checkpoint, family)
        check_complete(family, checkpoint, binding, allow_incomplete=allow_incomplete or is_partial)
        kv_scales = list(stored_kv_scales(checkpoint.tensors))
    except QuantkitError as error:
        yield Finding.of("config and tensors", error)
        return
    section = dict(checkpoint.quantization)
    if kv_scales:  # which answer it
        section.pop("kv_cache_scheme", None)
    yield from check_config(section, binding, family, is_partial=is_partial)
