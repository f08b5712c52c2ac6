"""One decoder layer of transformers with its weights, run over all sequences. Legend as in `states` and `observer`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import SourceError, first_line
from quantkit.statistics.names import KvPart
from quantkit.streaming.devices import is_out_of_memory, named_memory_errors
from quantkit.streaming.experts import ExpertWeights, Recorder, Routing, Visit
from quantkit.streaming.observer import Observer
from quantkit.streaming.own_errors import OwnErrors
from quantkit.streaming.states import States

BATCH_TOKENS = 2048  # of whole sequences that go through attention together
_INPUTS, _ANSWERS = "inputs", "answers"

Arguments = Callable[[int, int], Mapping[str, Any]]  # how the model calls this layer, for sequences and length


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedLayer:
    """``name``: ``model.layers.3``. ``module``: its weights are in memory, except those of ``experts``."""

    index: int
    name: str
    module: nn.Module
    experts: ExpertWeights | None
    arguments: Arguments
    device: torch.device
    dtype: torch.dtype

    @torch.no_grad()
    def run(self, states: States, *, observer: Observer | None = None, visit: Visit | None = None) -> Tensor | None:
        """Take all sequences through this layer; returns what the routed experts added [T, H], until the next layer.

        Raises SourceError where a hidden state is not finite, with its sequence and token; ResourceError where memory
        ends.
        """
        with named_memory_errors(self.name):
            return self._run(states, observer, visit)

    def _run(self, states: States, observer: Observer | None, visit: Visit | None) -> Tensor | None:
        self.attend(states, observer=observer)
        answers_TH = None
        if self.experts is not None:
            answers_TH = states.store(_ANSWERS, width=states.width, dtype=torch.float32).zero_()
            self.experts.answer(
                self._routing(states),
                answers_TH,
                device=self.device,
                dtype=self.dtype,
                observer=observer,
                visit=visit,
            )
            states.after.add_(answers_TH)
        self._check(states)
        states.keep()
        return answers_TH

    @torch.no_grad()
    def attend(self, states: States, *, observer: Observer | None = None) -> None:
        """All of the layer but its routed experts, whose input is kept; the states stay where they are.

        Raises SourceError where transformers' layer cannot be run, ResourceError where memory ends; other errors of the
        observer come as they are.
        """
        own = OwnErrors()
        with ExitStack() as stack:
            stack.enter_context(named_memory_errors(self.name))
            recorder = stack.enter_context(self._recorded(states, own)) if self.experts is not None else None
            watched = None if observer is None else _Watched(observer, own)
            if watched is not None:
                stack.enter_context(_observed(self.name, self.module, watched))
            tap = None if watched is None else _CacheTap(self.name, watched)
            for first, last in states.batches(BATCH_TOKENS):
                if recorder is not None:
                    recorder.first = first * states.length
                self._forward(states, first, last, tap, own)

    def _forward(self, states: States, first: int, last: int, tap: "_CacheTap | None", own: OwnErrors) -> None:
        options = dict(self.arguments(last - first, states.length))
        if "past_key_values" in options and not hasattr(_attention(self.module), "expand_kv"):
            options["past_key_values"] = tap
        if "prev_topk_indices" in options and states.carry is not None:
            options["prev_topk_indices"] = states.rows(states.carry, first, last).to(self.device)
        hidden = states.rows(states.hidden, first, last).to(self.device)
        try:
            answer = self.module(hidden, **options)
        except (RuntimeError, ValueError, IndexError) as error:
            if error in own or is_out_of_memory(error):
                raise
            raise SourceError(
                f"transformers cannot run it ({first_line(error)})",
                tensor=self.name,
                remedy="config.json does not fit the weights: download both again",
            ) from error
        if isinstance(answer, tuple):
            answer, carry = answer
            if carry is not None:
                states.hand_on(first, last, carry)
        states.rows(states.after, first, last)[:] = answer

    def _routing(self, states: States) -> Routing:
        assert self.experts is not None
        top_k = int(self.module.mlp.gate.top_k)  # type: ignore[union-attr, arg-type]
        return Routing(
            inputs_TC=states.store(_INPUTS, width=states.width, dtype=self.dtype),
            chosen_TK=states.store("chosen", width=top_k, dtype=torch.int64),
            factors_TK=states.store("factors", width=top_k, dtype=torch.float32),
        )

    @contextmanager
    def _recorded(self, states: States, own: OwnErrors) -> Iterator[Recorder]:
        block: Any = self.module.mlp
        experts, block.experts = block.experts, Recorder(self._routing(states), own)
        try:
            yield block.experts
        finally:
            block.experts = experts

    def _check(self, states: States) -> None:
        for first, last in states.batches(BATCH_TOKENS):
            is_finite_T = states.rows(states.after, first, last).isfinite().all(-1).reshape(-1)
            if not bool(is_finite_T.all()):
                sequence, token = divmod(first * states.length + int(is_finite_T.int().argmin()), states.length)
                raise SourceError(
                    f"its output is not finite at sequence {sequence}, token {token}",
                    tensor=self.name,
                    remedy="the weights of this layer are damaged, or overflow in this --dtype",
                )


def _attention(module: nn.Module) -> Any:
    return module.self_attn


class _Watched:
    """An observer whose errors are known for its own."""

    def __init__(self, observer: Observer, own: OwnErrors) -> None:
        self._observer, self._own = observer, own

    def linear(self, module: str, inputs_TC: Tensor) -> None:
        with self._own.noted():
            self._observer.linear(module, inputs_TC)

    def cache(self, attention: str, part: KvPart, values_THD: Tensor) -> None:
        with self._own.noted():
            self._observer.cache(attention, part, values_THD)


@contextmanager
def _observed(name: str, module: nn.Module, observer: _Watched) -> Iterator[None]:
    """Hooks on every Linear, and on what latent attention expands."""
    handles = []
    for inner, one in module.named_modules():
        if isinstance(one, nn.Linear):
            handles.append(one.register_forward_pre_hook(partial(_saw, f"{name}.{inner}", observer)))
    attention = _attention(module)
    expand = getattr(attention, "expand_kv", None)
    if expand is not None:
        attention.expand_kv = partial(_saw_latent, f"{name}.self_attn", observer, expand)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if expand is not None:
            del attention.expand_kv


def _saw(module: str, observer: _Watched, _: nn.Module, args: tuple[Tensor, ...]) -> None:
    observer.linear(module, args[0].reshape(-1, args[0].shape[-1]))


def _saw_latent(
    attention: str, observer: _Watched, expand: Callable[..., Any], latent: Tensor, rope: Tensor, **options: Any
) -> Any:
    observer.cache(attention, KvPart.LATENT, latent.reshape(-1, 1, latent.shape[-1]))
    observer.cache(attention, KvPart.ROPE, rope.reshape(-1, 1, rope.shape[-1]))
    return expand(latent, rope, **options)


class _CacheTap:
    """Stands in for a KV cache of grouped heads: keeps nothing, shows what it is given."""

    def __init__(self, name: str, observer: _Watched) -> None:
        self._name, self._observer = f"{name}.self_attn", observer

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """[N, H, S, D] each."""
        for part, one in ((KvPart.KEY, keys), (KvPart.VALUE, values)):
            self._observer.cache(self._name, part, one.transpose(1, 2).reshape(-1, one.shape[1], one.shape[-1]))
        return keys, values
