"""The model card of an output: what was done, from what, how close it is, and what serves it.

Made from conversion.json and config.json alone, so that a finished output tells it again word for word. The manifest
is data of a file that others may have changed: what it lacks or garbles is a KeyError, TypeError or ValueError here.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantkit.checkpoint.file_names import CONFIG_NAME, MANIFEST_NAME
from quantkit.checkpoint.json_files import read_json
from quantkit.convert.card_serving import fp8_parts, serving
from quantkit.errors import QuantkitError, VerificationError
from quantkit.integrity.manifest import read_manifest
from quantkit.machine import bytes_text
from quantkit.memory.budget import GIB
from quantkit.plan.limits import Partial
from quantkit.plan.plan import SOURCE_WORDS, Action

_PLAIN_YAML = re.compile(r"[A-Za-z][A-Za-z0-9._/-]*")
_NO_STRINGS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}  # plain, these are something else in YAML
_KEPT = {  # action and source codec, in words
    ("to bf16", "fp8_block"): "FP8 in the source, decoded to BF16",
    ("to bf16", "float_values"): "FP16 in the source, rounded to BF16",
    ("to fp8", "float_values"): "BF16 in the source, put back into the FP8 blocks that it was decoded from, exactly",
    ("copy", "fp8_block"): "FP8 in the source, codes and scales copied bit for bit",
    ("copy", "float_values"): "copied bit for bit, in the source's own BF16, FP16 or FP32",
    ("copy", "native_int4"): "INT4 in the source, copied bit for bit",
    ("relayout", "native_int4"): "INT4 in the source, laid out anew with the same codes and scales",
    ("copy", "opaque"): "copied bit for bit",
}


def read_card(output: Path) -> str:
    """The card of a finished output. Raises VerificationError where what it is made from is missing or damaged."""
    manifest = read_manifest(output).document
    try:
        config = read_json(output / CONFIG_NAME, what="convert again")
        return model_card(manifest, config)
    except VerificationError:
        raise
    except QuantkitError as error:
        raise VerificationError(error.message, file=output / CONFIG_NAME, remedy="convert again") from error
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise VerificationError(
            f"lacks or garbles what the card is made from ({error})",
            file=output / MANIFEST_NAME,
            remedy="convert again, with this version",
        ) from error


def model_card(manifest: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """README.md in Markdown. ``manifest`` without its files will do."""
    sections = (
        front_matter(manifest),
        _notice(manifest),
        _title(manifest),
        _scheme(manifest),
        _parts(manifest),
        _kept(manifest),
        _errors(manifest),
        _memory(manifest["memory_plan"]),
        serving(manifest, config),
        _limits(manifest),
    )
    text = "\n\n".join("\n".join(section) for section in map(list, sections) if section)
    return "".join(one if one.isprintable() or one == "\n" else f"\\u{ord(one):04x}" for one in text) + "\n"


def front_matter(manifest: Mapping[str, Any]) -> Iterator[str]:
    """YAML that the hub reads; the license is what the source's own card states, and nothing where it states none."""
    source = manifest["source"]
    yield "---"
    if "hub_id" in source:
        yield f"base_model: {_scalar(source['hub_id'])}"
        if has_int4(manifest):
            yield "base_model_relation: quantized"
    if manifest["recipe"]["layout"] != "w4afp8":
        yield "library_name: transformers"
    for key, value in source["license"].items():
        if isinstance(value, str):
            yield f"{key}: {_scalar(value)}"
        else:
            yield f"{key}:"
            yield from (f"- {_scalar(one)}" for one in value)
    yield "tags:"
    if has_int4(manifest):
        yield from (f"- {manifest['recipe']['layout']}", "- int4")
    yield "- quantkit"
    yield "---"


def has_int4(manifest: Mapping[str, Any]) -> bool:
    """Whether anything in the output is INT4, made here or native."""
    return any(part["action"] == Action.INT4 or part["source"] == "native_int4" for part in manifest["parts"])


def _scalar(text: str) -> str:
    """A YAML string on one line: quoted unless it cannot be taken for anything else."""
    is_plain = _PLAIN_YAML.fullmatch(text) is not None and text.lower() not in _NO_STRINGS
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def _notice(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Of a smoke run, before anything else."""
    if manifest.get("partial") is not None:
        notice = Partial.of(manifest["partial"]).notice
        yield f"**{notice[:1].upper()}{notice[1:]}.**"


def _title(manifest: Mapping[str, Any]) -> Iterator[str]:
    source, tool = manifest["source"], manifest["tool"]
    origin = f"`{source['hub_id']}`" if "hub_id" in source else "a local checkpoint"
    yield f"# {'INT4' if has_int4(manifest) else 'Copy'} of {origin}"
    yield ""
    if "hub_id" in source:
        link = f"https://huggingface.co/{source['hub_id']}/tree/{source['commit']}"
        yield f"Source: [{source['hub_id']}]({link}) at commit `{source['commit']}`."
    else:
        yield "Source: a directory, of which nobody said where it came from."
    yield (
        f"Made by quantkit {tool['version']} with recipe `{manifest['recipe']['name']}`. `{MANIFEST_NAME}` holds the "
        "resolved recipe, every figure below and the sha256 of every file, of the source too."
    )


def _scheme(manifest: Mapping[str, Any]) -> Iterator[str]:
    recipe = manifest["recipe"]
    actions = {part["action"] for part in manifest["parts"]}
    yield "## Scheme"
    yield ""
    stored = "w4afp8" if recipe["layout"] == "w4afp8" else "compressed-tensors `pack-quantized`"
    if Action.INT4 in actions:
        signs = "of either sign" if recipe["signed_scales"] and recipe["scales"] == "search" else "positive"
        kind = "INT4 with zero points" if recipe["zero_points"] else "Symmetric INT4"
        scales = manifest["calibration"]["parameters"]["scales"] if "calibration" in manifest else recipe["scales"]
        yield (
            f"{kind} ({stored}) in groups of {recipe['group_size']} columns, scales by {scales}, {signs}, "
            f"stored as BF16. {_activations(recipe)}"
        )
        if manifest.get("importance") is not None:
            yield ""
            yield _importance(manifest)
        yield from _calibration(manifest)
    elif has_int4(manifest):
        done = "moved from another layout" if Action.RELAYOUT in actions else "copied"
        yield (
            f"{'Asymmetric ' if recipe['zero_points'] else ''}INT4 as the source has it ({stored}, groups of "
            f"{recipe['group_size']}): codes and scales are {done} bit for bit. {_activations(recipe)}"
        )
    else:
        yield "Nothing is quantized."
        return
    if _has_fp8(manifest):
        names = "`float-quantized`" if recipe["layout"] != "w4afp8" and recipe["rest"] == "fp8" else "native FP8"
        yield ""
        yield (
            f"Beside them lie the source's own FP8 blocks of 128 x 128 ({names}), byte for byte: engines quantize the "
            "activations of these layers as they come."
        )


def _importance(manifest: Mapping[str, Any]) -> str:
    """Which file the search was weighted by, and how much of the output it covers."""
    importance = manifest["importance"]
    kinds = importance["weights"].values()
    own, rare, layer, none = (sum(one[kind] for one in kinds) for kind in ("own", "rare", "layer", "none"))
    about = importance["about"]
    origin = f", made of `{about['datasets'].replace('`', '')}`" if "datasets" in about else ""
    gains = importance["errors"].items()
    gained = "; ".join(
        f"{role} {error['relative_error']:.4f}, {error['without_importance']:.4f} without" for role, error in gains
    )
    return (
        f"The search is weighted by second moments of the inputs ({importance['kind']}{origin}, sha256 "
        f"`{importance['sha256']}`): {own:,} weights by their own, {rare:,} with few tokens and {layer:,} with none by "
        f"those of their layer, {none:,} without. Relative error as the inputs see it, of the first "
        f"{importance['sample_rows']} rows: {gained}."
    )


def _calibration(manifest: Mapping[str, Any]) -> Iterator[str]:
    """What a method saw, where codes and scales are not of the weights alone."""
    if "calibration" in manifest:
        recipe, made = manifest["recipe"], manifest["calibration"]
        seen = recipe["calibration"]
        yield ""
        yield (
            f"Codes and scales of {made['num_calibrated']:,} weights are chosen by {recipe['method'].upper()} "
            f"({made['by']}) over {seen['sequences']:,} sequences of {seen['length']:,} tokens."
        )


def _activations(recipe: Mapping[str, Any]) -> str:
    if recipe["layout"] == "w4afp8":
        scales = "static scales from statistics of their inputs" if recipe["input_scales"] else "the static scale 1"
        return f"Activations of the experts are FP8, with {scales}."
    if recipe["activations"] == "fp8-dynamic":
        return "Engines quantize the activations of INT4 modules to FP8 as they come."
    return "Activations are not quantized."


def _has_fp8(manifest: Mapping[str, Any]) -> bool:
    return next(fp8_parts(manifest), None) is not None


def _parts(manifest: Mapping[str, Any]) -> Iterator[str]:
    parts = manifest["parts"]
    yield "| part | source | done | weights | source size | output size |"
    yield "|---|---|---|---:|---:|---:|"
    for part in parts:
        sizes = f"{bytes_text(part['source_bytes'])} | {bytes_text(part['output_bytes'])}"
        source = SOURCE_WORDS[part["source"]]
        yield f"| {part['role']} | {source} | {part['action']} | {part['num_weights']:,} | {sizes} |"
    count, source_bytes, output_bytes = (
        sum(part[key] for part in parts) for key in ("num_weights", "source_bytes", "output_bytes")
    )
    yield f"| all | | | {count:,} | {bytes_text(source_bytes)} | {bytes_text(output_bytes)} |"


def _kept(manifest: Mapping[str, Any]) -> Iterator[str]:
    """What stays at 16 bits or as it was, by what happened to it."""
    groups: dict[str, list[str]] = {}
    for part in manifest["parts"]:
        if part["action"] != Action.INT4:
            groups.setdefault(_KEPT[part["action"], part["source"]], []).append(part["role"])
    if groups:
        yield "What is not quantized here:"
        yield ""
    for words, roles in groups.items():
        yield f"- {words}: {', '.join(sorted(roles))}"


def _errors(manifest: Mapping[str, Any]) -> Iterator[str]:
    if manifest["errors"]:
        yield "## Error"
        yield ""
        yield "Relative error of the INT4 weights against the decoded source, root of the sum of squares:"
        yield ""
        yield "| part | weights | relative error | median weight | worst weight |"
        yield "|---|---:|---:|---:|---:|"
    for role, error in manifest["errors"].items():
        figures = [error[f"{key}relative_error"] for key in ("", "median_", "worst_")]
        yield f"| {role} | {error['num_weights']:,} | " + " | ".join(f"{one:.4f}" for one in figures) + " |"


def _memory(plan: Mapping[str, Any]) -> Iterator[str]:
    yield f"## Memory at TP{plan['tp']}"
    yield ""
    if "reason" in plan:
        yield f"There is no memory plan at TP{plan['tp']}: {plan['reason']}."
        return
    yield (
        f"On {plan['tp']} x {plan['gpu']} under {plan['engine']} {plan['engine_version']}, with a context length of "
        f"{plan['context']:,} tokens and without the MTP layer, weights take "
        f"{plan['weights_bytes_per_gpu'] / GIB:.2f} GiB of each GPU. This is the arithmetic of `quantkit memory-plan`: "
        "no server was started for it."
    )
    yield ""
    yield "| KV cache | bytes a token, each GPU | tokens | at worst to at best | verdict |"
    yield "|---|---:|---:|---:|---|"
    for row in plan["kv_cache"]:
        low, mid, high = row["tokens"]
        cells = (row["dtype"].upper(), f"{row['bytes_per_token']:,}", f"{mid:,}", f"{low:,} to {high:,}")
        yield f"| {' | '.join(cells)} | {row['verdict']} |"


def _kv_scales(manifest: Mapping[str, Any]) -> str:
    scales = manifest.get("kv_scales")
    if scales is None:
        return "- FP8 KV scales are not part of this checkpoint."
    return (
        f"- FP8 KV scales are part of it ({scales['method']}, one for each {scales['per']}). Whether an engine uses "
        "them, passes them over or computes wrong with them depends on its attention backend: `quantkit kv-scales` on "
        "this directory says which."
    )


def _limits(manifest: Mapping[str, Any]) -> Iterator[str]:
    recipe = manifest["recipe"]
    yield "## Limits"
    yield ""
    yield _kv_scales(manifest)
    yield "- Quality was not evaluated by this conversion, and no engine was started by it."
    if recipe["signed_scales"] and manifest["errors"] and recipe["scales"] == "search":
        yield "- Scales may be negative: what reads them as unsigned (Marlin with INT8 activations) computes nonsense."
    if manifest["is_incomplete"]:
        yield "- **Incomplete**: weights that config.json promises are missing, as they were in the source."
    yield from (f"- {warning}" for warning in manifest["warnings"])
