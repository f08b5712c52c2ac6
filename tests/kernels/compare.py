"""The comparison of kernels with their twins, and outputs that show what was not written."""

import torch


def relative_mean(reference: torch.Tensor, got: torch.Tensor) -> float:
    """Mean of the absolute difference over the mean magnitude, in float64; infinite where NaN or Inf differ."""
    reference, got = reference.double().cpu(), got.double().cpu()
    assert reference.shape == got.shape, (reference.shape, got.shape)
    if not torch.equal(torch.isfinite(reference), torch.isfinite(got)):
        return float("inf")
    finite = torch.isfinite(reference)
    difference = (reference - got)[finite].abs().mean()
    return float(difference / reference[finite].abs().mean().clamp_min(1e-30))


def assert_close(label: str, reference: torch.Tensor, got: torch.Tensor, *, most: float) -> None:
    """``most``: of ``relative_mean``; every use says where the bound comes from."""
    found = relative_mean(reference, got)
    assert found <= most, f"{label}: relative mean difference {found:.3g}, at most {most:.3g} allowed"


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """NaN where the dtype has it (FP8 included), else bytes of 0xA5."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    byte = 0xFF if dtype.is_floating_point else 0xA5  # all ones are a NaN in every float format here
    tensor.view(torch.uint8).fill_(byte)
    return tensor
