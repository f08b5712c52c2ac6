"""How far a model is from another one, on windows of text: the figures of bench_quality.py."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from scripts.fp8_blocks import load_model, read_dense, read_int4, read_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One method on one model. ``divergence``: the mean of each window."""

    divergence: Tensor
    p99: float
    same_top: float
    perplexity_ratio: float
    weight_error: float

    def document(self) -> dict[str, float | list[float]]:
        return {
            "kl": self.divergence.mean().item(),
            "kl_standard_error": standard_error(self.divergence),
            "p99": self.p99,
            "same_top": self.same_top,
            "perplexity_ratio": self.perplexity_ratio,
            "weight_error": self.weight_error,
            "kl_of_windows": self.divergence.tolist(),
        }


def standard_error(values: Tensor) -> float:
    return float((values.std() / len(values) ** 0.5).item())


def ratio_of(first: Tensor, second: Tensor) -> tuple[float, float]:
    """Of the means of two methods on the same windows, and its standard error by the delta method."""
    ratio = (first.mean() / second.mean()).item()
    return ratio, standard_error(first - ratio * second) / second.mean().item()


@dataclass(frozen=True, slots=True)
class Reference:
    """The model of a source: its log probabilities on every window, and its weights."""

    source: Path
    tokens: Tensor
    weights: dict[str, Tensor]
    log_probabilities: list[Tensor]

    @classmethod
    def of(cls, source: Path, num_windows: int | None = None) -> "Reference":
        tokens, weights = read_tokens(source, "evaluation")[:num_windows], read_dense(source)
        return cls(source, tokens, weights, list(log_probabilities(source, weights, tokens)))

    def compare(self, output: Path) -> Figures:
        """What a directory says instead; the error is that of its INT4 weights together."""
        windows, all_tokens, same, lost = [], [], [], []
        found = log_probabilities(self.source, read_dense(output), self.tokens)
        for row, expected, got in zip(self.tokens, self.log_probabilities, found, strict=True):
            divergence = (expected.exp() * (expected - got)).sum(-1)
            windows.append(divergence.mean())
            all_tokens.append(divergence)
            same.append((expected.argmax(-1) == got.argmax(-1)).float())
            lost.append(functional.nll_loss(got[:-1], row[1:]) - functional.nll_loss(expected[:-1], row[1:]))
        return Figures(
            divergence=torch.stack(windows),
            p99=torch.cat(all_tokens).quantile(0.99).item(),
            same_top=torch.cat(same).mean().item(),
            perplexity_ratio=torch.stack(lost).mean().exp().item(),
            weight_error=self._weight_error(output),
        )

    def _weight_error(self, output: Path) -> float:
        error2 = norm2 = 0.0
        for name, weight in read_int4(output).items():
            error2 += (weight - self.weights[name]).double().square().sum().item()
            norm2 += self.weights[name].double().square().sum().item()
        return float((error2 / norm2) ** 0.5) if norm2 else 0.0


@torch.no_grad()
def log_probabilities(source: Path, weights: Mapping[str, Tensor], tokens: Tensor) -> Iterator[Tensor]:
    """Of each window [length, vocabulary]."""
    model = load_model(source, weights)
    for row in tokens:
        yield model(row[None], use_cache=False).logits[0].log_softmax(-1)
