"""Memory plans of published models."""

from functools import cache
from typing import Any

from quantkit.memory.gpus import GPUS
from quantkit.memory.make import decide, make_memory_plan
from quantkit.memory.model import Model, model_from_config
from quantkit.memory.plan import MemoryPlan
from quantkit.memory.scheme import Scheme
from quantkit.memory.serving import MemoryRequest, Serving
from tests.published import published_config

INT4 = Scheme(experts="int4", rest="bf16", group_size=32)
INT4_FP8 = Scheme(experts="int4", rest="fp8", group_size=32)
INT4_NATIVE = Scheme(experts="int4", rest="fp8-native", group_size=32)
FP8 = Scheme(experts="fp8", rest="fp8")


@cache
def model(name: str) -> Model:
    """By its published config."""
    return model_from_config(name, published_config(name), weights_from="config")


def plan(name: str, *, gpu: str = "h200", with_advice: bool = False, **request: Any) -> MemoryPlan:
    """Without advice unless asked: it plans ten times over."""
    return make_memory_plan(model(name), MemoryRequest(gpu=GPUS[gpu], **request), with_advice=with_advice)


def serving(name: str = "glm-5.2", *, gpu: str = "h200", **request: Any) -> Serving:
    """Everything decided but the stages."""
    return decide(model(name), MemoryRequest(gpu=GPUS[gpu], **request))
