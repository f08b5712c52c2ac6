"""How a function of vLLM's is replaced, once, and what it was before."""

import functools
from collections.abc import Callable
from typing import Any

from quantkit.kv_guard.engines.targets import resolve

_MARK = "quantkit_kv_guard_original"


def wrap(name: str, wrapper_of: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let the attribute at a dotted ``name`` be ``wrapper_of`` what it is; once, however often a plugin is loaded."""
    holder = resolve(name.rpartition(".")[0])
    leaf = name.rpartition(".")[2]
    original = getattr(holder, leaf)
    if hasattr(original, _MARK):
        return
    wrapper = functools.wraps(original)(wrapper_of(original))
    setattr(wrapper, _MARK, original)
    setattr(holder, leaf, wrapper)


def original_of(function: Any) -> Any:
    """What was there before `wrap`; None where it was not wrapped."""
    return getattr(function, _MARK, None)
