"""What each case of the benchmark must reach on an H200, and what it is meant to reach.

``must`` is where a kernel is worth having, from published figures of others; ``target`` where it is as good as the best
of them. Cases that nobody has published a figure for have none.
"""

from collections.abc import Mapping
from dataclasses import dataclass

USUAL, BF16, BF16_ROWS = "usual Triton", "BF16", "BF16 rows"  # other ways that goals name


@dataclass(frozen=True)
class Goal:
    """``what``: ``us``, at most; at least ``% of copies``, ``TB/s``, or ``x NAME``, times as long as that way takes."""

    what: str
    must: float
    target: float

    def text(self, measured: Mapping[str, float]) -> str:
        """Whether both were met, by figures under the names of ``what``."""
        found = measured.get(self.what)
        if found is None:
            return f"{self.what} unknown"

        def met(limit: float) -> str:
            return "met" if (found <= limit if self.what == "us" else found >= limit) else "missed"

        return f"must {self.must:g} {self.what} {met(self.must)}, target {self.target:g} {met(self.target)}"


EXPERTS = {  # microseconds of a layer on one of eight GPUs, both products
    ("glm-5.2", 1): Goal("us", 24, 18),
    ("glm-5.2", 8): Goal("us", 70, 52),
    ("glm-5.2", 16): Goal("us", 120, 90),
    ("glm-5.2", 32): Goal("us", 190, 140),
    ("glm-5.2", 64): Goal("us", 260, 190),
    ("kimi-k2", 16): Goal("us", 160, 112),
}


def dense_goals(num_rows: int, num_cols: int, num_tokens: int) -> tuple[Goal, ...]:
    """For 64 MB of packed weights or more: less does not fill the GPU for long."""
    if num_rows * num_cols // 2 < 64e6 or num_tokens > 64:
        return ()
    if num_tokens > 16:
        ratio = 2.4 if num_tokens <= 32 else 1.8
        return (Goal(f"x {BF16}", min(2.0, ratio), ratio),)
    return Goal("% of copies", 50, 68), Goal(f"x {BF16}", 2.0, 2.7)


def expert_goals(model: str, num_tokens: int) -> tuple[Goal, ...]:
    if model not in {name for name, _ in EXPERTS} or num_tokens > 64:
        return ()
    timed = EXPERTS.get((model, num_tokens))
    return (*([timed] if timed else []), Goal(f"x {USUAL}", 2, 4))


def store_goals(num_tokens: int) -> tuple[Goal, ...]:
    return (Goal("us", 3, 3),) if num_tokens <= 64 else ()


def tag_goals(num_pages: int) -> tuple[Goal, ...]:
    """A launch and little more; bytes do not matter yet."""
    return () if num_pages > 32768 else (Goal("us", 3, 3) if num_pages <= 8192 else Goal("us", 6, 6),)


def decode_goals(layout: str, num_seqs: int, context: int) -> tuple[Goal, ...]:
    """FP8 rows never take longer than BF16 rows, which are twice the bytes."""
    if layout == "bf16" or context < 8192:
        return ()
    is_long = context >= 32768 and num_seqs >= 8
    ratio = Goal(f"x {BF16_ROWS}", 1.0, 1.54 if is_long else 1.0)
    return (Goal("TB/s", 1.5, 2.4), ratio) if num_seqs * context >= 1 << 18 else (ratio,)


def requantize_goals(scales: str) -> tuple[Goal, ...]:
    """The search is bound by arithmetic."""
    return (Goal("% of copies", 70, 70),) if scales == "absmax" else ()
