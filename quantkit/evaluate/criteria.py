"""What a pipeline asks of an output."""

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.evaluate.summary import Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Criteria:
    """``max_kl`` in nats, ``min_top1`` a share of the predictions; None where nothing is asked."""

    max_kl: float | None
    min_top1: float | None

    def failures(self, summary: Summary) -> Iterator[str]:
        """What is missed, with both figures."""
        kl, top1 = summary.kl.mean.value, summary.same_top.value
        if self.max_kl is not None and kl > self.max_kl:
            yield f"mean KL divergence {kl:.4g} is above {self.max_kl:g}"
        if self.min_top1 is not None and top1 < self.min_top1:
            yield f"top-1 agreement {top1:.4f} is below {self.min_top1:g}"
