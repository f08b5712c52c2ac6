"""The model card of an output: what was done, from what, and how close it is. Nothing varies from run to run."""

from collections.abc import Mapping, Sequence

from quantkit import __version__
from quantkit.integrity.weight_errors import ClassError
from quantkit.machine import bytes_text
from quantkit.plan.plan import Plan


def model_card(plan: Plan, classes: Sequence[ClassError], provenance: Mapping[str, str]) -> str:
    """README.md in Markdown."""
    source = f"`{provenance['hub_id']}` at `{provenance['commit']}`" if provenance else "a local checkpoint"
    signs = "of either sign" if plan.recipe.signed_scales and plan.recipe.scales == "search" else "positive"
    notice = [] if plan.partial is None else [f"**{plan.partial.notice[:1].upper()}{plan.partial.notice[1:]}.**", ""]
    lines = [
        *notice,
        f"# INT4 of {source}",
        "",
        f"Made by quantkit {__version__} with recipe `{plan.recipe.name}`: INT4 (compressed-tensors "
        f"`pack-quantized`), groups of {plan.recipe.group_size}, scales by {plan.recipe.scales}, {signs}, stored as "
        "BF16. `conversion.json` holds the resolved recipe and the sha256 of every file.",
        "",
        "| part | source | done | weights | source size | output size |",
        "|---|---|---|---:|---:|---:|",
        *(
            f"| {part.role} | {part.source} | {part.action} | {part.num_weights:,} "
            f"| {bytes_text(part.source_bytes)} | {bytes_text(part.output_bytes)} |"
            for part in plan.parts
        ),
    ]
    if classes:
        lines += [
            "",
            "Relative error of the INT4 weights against the decoded source:",
            "",
            "| part | weights | relative error | worst weight |",
            "|---|---:|---:|---:|",
            *(f"| {one.role} | {one.num_weights} | {one.relative:.4f} | {one.worst:.4f} |" for one in classes),
        ]
    for engine, advice in plan.recipe.engines.items():
        lines += ["", f"## {engine}", "", *(f"- {line}" for line in advice)]
    if not plan.recipe.engines:
        lines += ["", "This recipe has no serving notes; those of `quantkit recipes` do (`--recipe NAME`)."]
    if plan.warnings:
        lines += ["", "## Warnings", "", *(f"- {warning}" for warning in plan.warnings)]
    lines += [
        "",
        "FP8 KV scales are not part of this checkpoint. Quality was not evaluated by this conversion.",
        "",
    ]
    return "\n".join(lines)
