"""The engines that a plan can be made for: a new one is a file and a line here."""

from collections.abc import Mapping

from quantkit.engines.parallel import EngineName
from quantkit.memory.engine_rules import EngineRules
from quantkit.memory.sglang import SGLANG
from quantkit.memory.vllm import VLLM

RULES: Mapping[EngineName, EngineRules] = {"sglang": SGLANG, "vllm": VLLM}
