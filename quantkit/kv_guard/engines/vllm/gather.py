"""Reports of every rank in one output: vLLM takes the answer of one worker alone, unless somebody aggregates."""

from collections.abc import Callable, Sequence
from typing import Any

from quantkit.kv_guard.engines.vllm.events import EVENTS, StepReport

_OF_A_STEP = ("execute_model", "sample_tokens")


class ReportGatherer:
    """In place of vLLM's `KVOutputAggregator`, or of none; what it does not know it leaves to that."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def aggregate(self, outputs: Sequence[Any], output_rank: int = 0) -> Any:
        """The output of ``output_rank``, with what every rank saw."""
        report = together(outputs)
        output = outputs[output_rank] if self._inner is None else self._inner.aggregate(outputs, output_rank)
        if output is not None:
            setattr(output, EVENTS, report)
        return output


def together(outputs: Sequence[Any]) -> StepReport | None:
    """None where no step was reported: a worker that returned a step and no report is as if none had."""
    reports: list[StepReport | None] = [getattr(output, EVENTS, None) for output in outputs if output is not None]
    whole = reports[0] if reports else None
    for report in reports[1:]:
        whole = None if whole is None or report is None else whole.together(report)
    return whole


def gathering(original: Callable[..., Any]) -> Callable[..., Any]:
    """`MultiprocExecutor.collective_rpc`, which asks all workers where an aggregator is named."""

    def collective_rpc(executor: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method in _OF_A_STEP:
            kwargs["kv_output_aggregator"] = ReportGatherer(kwargs.get("kv_output_aggregator"))
        return original(executor, method, *args, **kwargs)

    return collective_rpc
