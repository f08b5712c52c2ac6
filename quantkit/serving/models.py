"""What a model's chat format asks of a server: parsers of tool calls and of reasoning, as data.

Both engines call them alike. Read in SGLang 0.5.23 (`function_call_parser.py`, `reasoning_parser.py`) and vLLM 0.33.0
(`tool_parsers/__init__.py`, `reasoning/__init__.py`).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsers:
    """``tool``: of tool calls; ``reasoning``: of the thoughts before an answer."""

    tool: str
    reasoning: str


_GLM_4 = "glm4_moe"
GLM_45 = Parsers(tool="glm45", reasoning="glm45")
_GLM_47 = Parsers(tool="glm47", reasoning="glm45")
_KIMI = Parsers(tool="kimi_k2", reasoning="kimi_k2")
_BY_MODEL_TYPE: Mapping[str, Parsers] = {"glm_moe_dsa": _GLM_47, "kimi_k2": _KIMI, "kimi_k25": _KIMI}
# one model_type for three chat formats: the version stands in names alone
_BY_VERSION: Mapping[str, Parsers] = {"5": GLM_45, "6": GLM_45, "7": _GLM_47}
_VERSION = re.compile(r"glm-?4\.(\d)", re.IGNORECASE)


def parsers_of(model_type: str, names: Iterable[str]) -> Parsers | None:
    """None where they are not known. ``names``: what the checkpoint and its source are called, the best first."""
    if model_type != _GLM_4:
        return _BY_MODEL_TYPE.get(model_type)
    versions = (match[1] for name in names for match in _VERSION.finditer(name))
    return next((_BY_VERSION[version] for version in versions if version in _BY_VERSION), None)


def chooses_itself(model_type: str) -> bool:
    """Whether SGLang tells the formats of this type apart by the chat template (its ``auto``)."""
    return model_type == _GLM_4
