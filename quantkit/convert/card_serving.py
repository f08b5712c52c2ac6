"""What a model card says of serving: a launch line for each engine that the output is for, and advice."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from quantkit.engines.mixed import BLOCK
from quantkit.engines.parallel import ENGINES, EngineName
from quantkit.engines.schemes import kind_of
from quantkit.engines.tensor_parallel import legal_tp
from quantkit.families import FAMILIES
from quantkit.families.family import Role
from quantkit.plan.plan import Action

_LAUNCH: dict[EngineName, tuple[str, str]] = {  # the command, and its option for tensor parallelism
    "sglang": ("python -m sglang.launch_server --model-path MODEL", "--tp-size"),
    "vllm": ("vllm serve MODEL", "--tensor-parallel-size"),
}
_OPTIONS = re.compile(r"--[a-z][a-z-]*(?: [\w.]+)?(?: --[a-z][a-z-]*(?: [\w.]+)?)*")  # that an advice begins with
_MOST_TP = 8


def fp8_parts(manifest: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What the output holds in FP8 blocks."""
    for part in manifest["parts"]:
        if part["action"] == Action.TO_FP8 or (part["action"] == Action.COPY and part["source"] == "fp8_block"):
            yield part


def serving(manifest: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    """A launch line for each engine, as the recipe advises or plain, and what else the recipe says of it."""
    yield "## Serving"
    yield ""
    yield "MODEL is the id of this repository, or the directory that holds it. These lines were not run here."
    advised = manifest["recipe"]["engines"]
    for engine in ENGINES if not advised else [engine for engine in ENGINES if engine in advised]:
        command, option = _LAUNCH[engine]
        advice = list(advised.get(engine, ()))
        match = _OPTIONS.match(advice[0]) if advice and option in advice[0] else None
        if match is not None:
            options = match[0]
            notes = advice[1:] if match[0] == advice[0] else advice
        else:
            tp = _tp_size(manifest, config, engine)
            options, notes = f"{option} {tp}", advice
        yield ""
        if options.endswith(" 0"):
            yield f"{engine}: no tensor parallel size up to {_MOST_TP} divides this checkpoint."
        else:
            yield from ("```sh", f"{command} {options}", "```")
        if notes:
            yield ""
        yield from (f"- {note}" for note in notes)


def _tp_size(manifest: Mapping[str, Any], config: Mapping[str, Any], engine: EngineName) -> int:
    """The largest up to 8 that the engine takes, 8 where that is not known, 0 where there is none."""
    family, group_size = FAMILIES[manifest["family"]], manifest["recipe"]["group_size"]
    is_rest_fp8 = any(part["role"] != Role.ROUTED_EXPERT for part in fp8_parts(manifest))
    rest_block = BLOCK[0] if is_rest_fp8 else None
    verdicts = legal_tp(
        family=family,
        config=config,
        group_size=group_size,
        rest_block=rest_block,
        kind=kind_of(config),
    )
    sizes = [one.tp for one in verdicts if one.engine == engine and one.status != "refused" and one.tp <= _MOST_TP]
    return max(sizes, default=0)
