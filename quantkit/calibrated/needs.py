"""What a method that sees inputs will need: disk, tokens, memory. From headers, and without torch."""

import math
from dataclasses import dataclass
from pathlib import Path

from quantkit.calibrated.memory import streaming_bytes
from quantkit.calibrated.modules import Shapes, chosen_shapes, decoded_plan, layer_number, run_shapes
from quantkit.checkpoint.disk import free_bytes
from quantkit.checkpoint.file_names import WORDS_SUFFIX
from quantkit.errors import ResourceError
from quantkit.families import FAMILIES
from quantkit.families.config_values import integer
from quantkit.families.family import Role
from quantkit.hidden_states import state_bytes
from quantkit.machine import bytes_text
from quantkit.module_names import expert_of
from quantkit.plan.mtp import is_in, mtp_layers
from quantkit.plan.plan import Plan
from quantkit.plan.resources import disk_bytes
from quantkit.words import has_words, words_bytes

_MEMORY_SHARE = 0.7  # of what there is, for a whole model alone


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationNeeds:
    """Of one way to choose the words of a plan.

    ``streaming``: layer by layer, and not by llm-compressor. ``wanted_tokens``: with so many every expert sees as many
    as its widest input has channels, if all are chosen alike; None where they are not what counts, or not known.
    ``words_bytes``: of files beside the output, until that is in place. ``token_bytes``: of the hidden states of one
    token, in files. ``decoded_bytes``: of the source in BF16, while it is needed. ``memory_bytes``: streaming the most
    for weights and Hessians; else what holds the whole model, and with less some of it lies on the disk.
    """

    streaming: bool
    wanted_tokens: int | None
    words_bytes: int
    token_bytes: int
    decoded_bytes: int
    output_bytes: int
    memory_bytes: int

    def disk_bytes(self, num_tokens: int) -> int:
        """At most at a time: the words, and first what they are made of, then the output."""
        return self.words_bytes + max(num_tokens * self.token_bytes, self.decoded_bytes, self.output_bytes)


def calibration_needs(plan: Plan, *, streaming: bool | None = None) -> tuple[CalibrationNeeds, ...]:
    """Of every way that the plan's method has, or of the one that was asked for; none for the search."""
    ways = {"search": (), "gptq": (True, False), "awq": (False,)}[plan.recipe.method]
    needs = {True: _streaming_needs, False: _whole_model_needs}
    return tuple(needs[way](plan) for way in ways if streaming in (None, way))


def words_directory(target: Path) -> Path:
    """Where the words of an output lie until that is in place."""
    return target.with_name(target.name + WORDS_SUFFIX)


def check_disk(needs: CalibrationNeeds, target: Path, *, num_tokens: int) -> None:
    """Raise ResourceError where words that are still to be made, and all that goes with them, have no room."""
    directory = words_directory(target)
    if has_words(directory):
        return
    there = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    needed, free = needs.disk_bytes(num_tokens), free_bytes(directory) + there
    if needed > free:
        made_of = "hidden states" if needs.streaming else "the decoded source"
        raise ResourceError(
            f"words, {made_of} and then the output need {bytes_text(needed)} and {bytes_text(free)} are free",
            file=directory,
            remedy="free space, or choose another disk with -o",
        )


def model_memory_bytes(model_bytes: int) -> int:
    """What must be free for a whole model to be held: its weights are not all that takes memory."""
    return math.ceil(model_bytes / _MEMORY_SHARE)


def _streaming_needs(plan: Plan) -> CalibrationNeeds:
    family, config = FAMILIES[plan.family], plan.checkpoint.config
    drafts, shapes = mtp_layers(family, config), run_shapes(plan)
    jobs = (job for job in plan.jobs if job.role != Role.VISION and not is_in(drafts, job.weight.name))
    weights = [job.weight for job in jobs]
    # a file for each layer, also where nothing of it becomes INT4
    files: dict[int | None, Shapes] = {number: {} for number in map(layer_number, (one.name for one in weights))}
    files.pop(None, None)
    for name, shape in shapes.items():
        files.setdefault(layer_number(name), {})[name] = shape
    return CalibrationNeeds(
        streaming=True,
        wanted_tokens=_wanted_tokens(plan, shapes),
        words_bytes=sum(words_bytes(of_layer, group_size=plan.recipe.group_size) for of_layer in files.values()),
        token_bytes=state_bytes(1, integer(family.text_config(config), "hidden_size", at_least=1)),
        decoded_bytes=0,
        output_bytes=disk_bytes(plan),
        memory_bytes=streaming_bytes(weights, shapes),
    )


def _wanted_tokens(plan: Plan, shapes: Shapes) -> int | None:
    """An expert gets its share of the tokens, another Linear all of them."""
    family, config = FAMILIES[plan.family], plan.checkpoint.config
    linears = max((num_cols for name, (_, num_cols) in shapes.items() if not expert_of(name)), default=0)
    experts = max((num_cols for name, (_, num_cols) in shapes.items() if expert_of(name)), default=0)
    if not experts:
        return linears
    chosen = integer(family.text_config(config), "num_experts_per_tok", 0)
    return max(linears, math.ceil(experts * family.num_experts(config) / chosen)) if chosen else None


def _whole_model_needs(plan: Plan) -> CalibrationNeeds:
    decoded, shapes = decoded_plan(plan), chosen_shapes(plan)
    shards = plan.checkpoint.shards if decoded is None else decoded.shards
    # every expert is fed all tokens here; AWQ takes means of them, for which few will do
    widest = max((num_cols for _, num_cols in shapes.values()), default=0)
    return CalibrationNeeds(
        streaming=False,
        wanted_tokens=widest if plan.recipe.method == "gptq" else None,
        words_bytes=words_bytes(shapes, group_size=plan.recipe.group_size),
        token_bytes=0,
        decoded_bytes=0 if decoded is None else disk_bytes(decoded),
        output_bytes=disk_bytes(plan),
        memory_bytes=model_memory_bytes(sum(shard.file_bytes for shard in shards)),
    )
