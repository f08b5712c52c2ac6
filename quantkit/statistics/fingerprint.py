"""Which model statistics are of: a digest of its norms, and of samples of other weights by role and form."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_SAMPLE = re.compile(r"([a-z_]+/[a-z0-9-]+)=([0-9a-f]{64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """``norms``: sha256 in hexadecimal. ``samples``: the same by ``attention/fp8-128x128``, as far as there are any."""

    norms: str
    samples: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Of the samples, for metadata."""
        return " ".join(f"{key}={digest}" for key, digest in sorted(self.samples.items()))

    def difference(self, other: "Fingerprint") -> str | None:
        """What tells the two models apart; None where nothing does. Only samples that both have are compared."""
        if self.norms != other.norms:
            return "the gains of their norms"
        found = [
            key for key in sorted(self.samples.keys() & other.samples.keys()) if self.samples[key] != other.samples[key]
        ]
        return f"weights of {', '.join(key.partition('/')[0] for key in found)}" if found else None


def fingerprint_from(norms: str, text: str) -> Fingerprint:
    """As metadata hold it; a file that holds no samples is known by its norms alone."""
    return Fingerprint(norms=norms, samples=dict(_SAMPLE.findall(text)))
