"""What conversion.json says: the run as data, all that the model card is made from; and which run it speaks of.

The same for the same source, recipe and version, wherever and however it ran.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from quantkit import __version__
from quantkit.checkpoint.file_names import CONFIG_NAME, INDEX_NAME, README_NAME, SOURCE_README_NAME
from quantkit.checkpoint.reader import hash_file
from quantkit.checkpoint.source import open_checkpoint
from quantkit.convert.conversion import Conversion
from quantkit.convert.execution import Execution
from quantkit.engines.parallel import DEFAULT_ENGINE, ENGINE_VERSIONS, EngineName, Parallel
from quantkit.errors import QuantkitError
from quantkit.importance.cover import Importance
from quantkit.integrity.manifest import MANIFEST_FORMAT, Manifest
from quantkit.integrity.weighed_errors import SAMPLE_ROWS, ClassGain
from quantkit.integrity.weight_errors import ClassError
from quantkit.memory.gpus import DEFAULT_GPU, gpu_named
from quantkit.memory.kv_format import KvDtype
from quantkit.memory.make import FALLBACK_CONTEXT, make_memory_plan
from quantkit.memory.model import model_from_checkpoint
from quantkit.memory.plan import MemoryPlan
from quantkit.memory.serving import MemoryRequest
from quantkit.plan.plan import Plan
from quantkit.recipe import recipe_document
from quantkit.verify.hashes import check_hashes
from quantkit.verify.report import Finding

PLANNED_TP = 8
_LICENSE_KEYS = ("license", "license_name", "license_link")
_MOST_FRONT_MATTER = 64 << 10  # bytes
_LONGEST_LICENSE = 200


def manifest_document(
    plan: Plan, execution: Execution, classes: tuple[ClassError, ...], conversion: Conversion, directory: Path
) -> dict[str, Any]:
    """Everything but the files of the output, which are not all there yet. ``directory`` holds its tensors."""
    words = conversion.words
    return {
        "format": MANIFEST_FORMAT,
        "tool": {"name": "quantkit", "version": __version__},
        "recipe": recipe_document(plan.recipe),
        "family": plan.family,
        "is_incomplete": plan.is_incomplete,
        **({} if plan.partial is None else {"partial": plan.partial.document()}),
        **({} if plan.importance is None else {"importance": importance_document(plan.importance, execution.gains)}),
        **({} if words is None else {"calibration": words.summary}),
        "source": {
            **conversion.provenance,
            "license": license_of(directory / SOURCE_README_NAME),
            "config_sha256": hash_file(plan.checkpoint.directory / CONFIG_NAME),
            "shards": {name: record.document() for name, record in sorted(execution.source_records.items())},
        },
        "output": {"num_tensors": plan.num_tensors, "tensor_bytes": plan.tensor_bytes, "files": {}},
        "parts": [
            {
                "role": part.role,
                "action": part.action,
                "source": part.codec,
                "num_weights": part.num_weights,
                "num_elements": part.num_elements,
                "source_bytes": part.source_bytes,
                "output_bytes": part.output_bytes,
            }
            for part in plan.parts
        ],
        "errors": {
            error.role: {
                "num_weights": error.num_weights,
                "relative_error": error.relative,
                "median_relative_error": error.median,
                "worst_relative_error": error.worst,
                "worst_weight": error.worst_name,
            }
            for error in classes
        },
        "rules": [
            {"rule": count.rule, "action": count.action, "num_weights": count.num_weights} for count in plan.rules
        ],
        "memory_plan": memory_document(directory, plan.recipe.engines),
        "dropped_tensors": dict(sorted(plan.dropped.items())),
        "skipped_files": dict(plan.checkpoint.sidecars.skipped),
        "warnings": list(plan.warnings),
    }


def importance_document(importance: Importance, gains: Iterable[ClassGain]) -> dict[str, Any]:
    """The file of second moments, what it covers, and what it has gained."""
    return {
        **importance.document(),
        "sample_rows": SAMPLE_ROWS,
        "errors": {
            gain.role: {
                "num_weights": gain.num_weights,
                "relative_error": gain.relative,
                "without_importance": gain.plain,
            }
            for gain in gains
        },
    }


def recorded_gains(document: Mapping[str, Any]) -> tuple[ClassGain, ...]:
    """What importance has gained, as a manifest tells it."""
    return tuple(
        ClassGain(
            role=role,
            num_weights=error["num_weights"],
            relative=error["relative_error"],
            plain=error["without_importance"],
        )
        for role, error in (document.get("importance") or {"errors": {}})["errors"].items()
    )


def recorded_errors(document: Mapping[str, Any]) -> tuple[ClassError, ...]:
    """Errors by class, as a manifest tells them."""
    return tuple(
        ClassError(
            role=role,
            num_weights=error["num_weights"],
            relative=error["relative_error"],
            median=error["median_relative_error"],
            worst=error["worst_relative_error"],
            worst_name=error["worst_weight"],
        )
        for role, error in document["errors"].items()
    )


def differences(manifest: Manifest, conversion: Conversion) -> Iterator[str]:
    """How a manifest's run was another one: recipe, version, source and limits are compared.

    A commit of the hub says what the source was; a directory is hashed.
    """
    plan, there, source = conversion.plan, manifest.document, manifest.document["source"]
    for what, one, other in (
        ("version of quantkit", there["tool"]["version"], __version__),
        ("recipe", manifest.recipe, recipe_document(plan.recipe)),
        ("family", there["family"], plan.family),
        (
            "importance file",
            {key: (there.get("importance") or {}).get(key) for key in ("kind", "sha256")},
            {"kind": None, "sha256": None} if plan.importance is None else plan.importance.identity(),
        ),
        ("part of it", there.get("partial"), None if plan.partial is None else plan.partial.document()),
        *((f"source ({key})", source.get(key), conversion.provenance.get(key)) for key in ("hub_id", "commit")),
        (
            "source (its shards)",
            {name: record.file_bytes for name, record in manifest.source_shards.items()},
            {shard.name: shard.file_bytes for shard in plan.checkpoint.shards},
        ),
    ):
        if one != other:
            yield f"with another {what}"
    if not conversion.provenance:
        yield from _other_bytes(manifest, conversion)


def _other_bytes(manifest: Manifest, conversion: Conversion) -> Iterator[str]:
    checkpoint = conversion.plan.checkpoint
    if manifest.document["source"]["config_sha256"] != hash_file(checkpoint.directory / CONFIG_NAME):
        yield f"from another {CONFIG_NAME}"
    written = {README_NAME, CONFIG_NAME, INDEX_NAME, *(shard.name for shard in conversion.plan.shards)}
    copied = {name: record.sha256 for name, record in manifest.output_files.items() if name not in written}
    if copied != {sidecar.name: hash_file(sidecar.path) for sidecar in checkpoint.sidecars.copied}:
        yield "from a source with other files beside the weights"
    for finding in check_hashes(
        checkpoint.directory,
        manifest.source_shards,
        wrong=Finding(check="source", message="is another"),
        num_jobs=conversion.num_jobs,
        report_progress=conversion.report_progress,
    ):
        yield f"from another {finding.file}"


def memory_document(directory: Path, engines: Collection[EngineName]) -> dict[str, Any]:
    """What a GPU of 8 holds, for each KV dtype that the engine takes; or the ``reason`` why that cannot be said.

    ``engines``: that the output is for; any where there are none.
    """
    engine = next(iter(engines)) if engines and DEFAULT_ENGINE not in engines else DEFAULT_ENGINE
    gpu = gpu_named(DEFAULT_GPU)
    head = {
        "engine": engine,
        "engine_version": ENGINE_VERSIONS[engine],
        "gpu": gpu.title,
        "tp": PLANNED_TP,
    }
    plans: dict[KvDtype, MemoryPlan] = {}
    reason = ""
    checkpoint = open_checkpoint(directory)
    for dtype in KvDtype:
        try:
            model = model_from_checkpoint("this checkpoint", checkpoint, weights_from="its headers")
            context = min(model.max_context or FALLBACK_CONTEXT, FALLBACK_CONTEXT)
            parallel = Parallel(tp=PLANNED_TP)
            request = MemoryRequest(gpu=gpu, engine=engine, parallel=parallel, kv_dtype=dtype, context=context)
            plans[dtype] = make_memory_plan(model, request, with_advice=False)
        except QuantkitError as error:
            reason = reason or error.message
    if not plans:
        return {**head, "reason": reason}
    made = next(iter(plans.values()))
    return {
        **head,
        "weights_bytes_per_gpu": made.tightest.weights.num_bytes,
        "context": made.demand.context,
        "kv_cache": [
            {
                "dtype": dtype.value,
                "bytes_per_token": int(plan.tightest.cell.num_bytes),
                "tokens": list(plan.num_tokens),
                "verdict": plan.verdict.value,
            }
            for dtype, plan in plans.items()
        ],
    }


def license_of(readme: Path) -> dict[str, str | list[str]]:
    """What the front matter of a model card states; nothing where there is none that can be read."""
    try:
        with readme.open("rb") as stream:
            text = _front_matter(stream.read(_MOST_FRONT_MATTER).decode("utf-8-sig", errors="replace"))
        # aliases and merge keys make documents that never end
        document = None if any(isinstance(one, yaml.AliasEvent) for one in yaml.parse(text)) else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    if not isinstance(document, Mapping):
        return {}
    return {key: document[key] for key in _LICENSE_KEYS if _is_license(document.get(key))}


def _front_matter(text: str) -> str:
    lines = text.splitlines()
    if not lines or lines[0].rstrip() != "---":
        return ""
    end = next((number for number, line in enumerate(lines[1:], 1) if line.rstrip() == "---"), 1)
    return "\n".join(lines[1:end])


def _is_license(value: object) -> bool:
    if isinstance(value, list):
        return 0 < len(value) <= _LONGEST_LICENSE and all(isinstance(one, str) and _is_license(one) for one in value)
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_LICENSE and value.isprintable()
