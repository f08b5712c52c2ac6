"""The comparison of kernels with their twins, and outputs that show what was not written."""

import torch

ELEMENT = 8  # times the bound of a mean, of the root mean square of a row


def relative_mean(reference: torch.Tensor, got: torch.Tensor) -> float:
    """Mean of the absolute difference over the mean magnitude, in float64; infinite where NaN or Inf differ."""
    reference, got = reference.double().cpu(), got.double().cpu()
    assert reference.shape == got.shape, (reference.shape, got.shape)
    if not torch.equal(torch.isfinite(reference), torch.isfinite(got)):
        return float("inf")
    finite = torch.isfinite(reference)
    difference = (reference - got)[finite].abs().mean()
    return float(difference / reference[finite].abs().mean().clamp_min(1e-30))


def largest_of_rms(reference: torch.Tensor, got: torch.Tensor) -> float:
    """The largest difference over the root mean square of its row; infinite where a row of zeros is not."""
    reference, got = reference.double().cpu(), got.double().cpu()
    finite = torch.isfinite(reference) & torch.isfinite(got)
    difference = torch.where(finite, reference - got, 0.0).abs()
    rms = torch.where(finite, reference, 0.0).square().mean(-1, keepdim=True).sqrt()
    return float(torch.where(difference == 0, 0.0, difference / rms).max()) if difference.numel() else 0.0


def assert_close(label: str, reference: torch.Tensor, got: torch.Tensor, *, most: float) -> None:
    """``most``: of ``relative_mean``; every use says where the bound comes from. No element is off by eight times that.

    What rounding leaves of one element is at most ``most`` of its own size, and values reach some five times the root
    mean square of their row; what the roundings before it add is like a normal variable of less than ``most`` of that.
    So an element that was not written, or is that of another place, is seen unless it is near zero by chance.
    """
    found = relative_mean(reference, got)
    assert found <= most, f"{label}: relative mean difference {found:.3g}, at most {most:.3g} allowed"
    largest = largest_of_rms(reference, got)
    assert largest <= ELEMENT * most, (
        f"{label}: an element is off by {largest:.3g} of its row, at most {ELEMENT * most}"
    )


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """NaN where the dtype has it (FP8 included), else bytes of 0xA5."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    byte = 0xFF if dtype.is_floating_point else 0xA5  # all ones are a NaN in every float format here
    tensor.view(torch.uint8).fill_(byte)
    return tensor


def assert_same_tensors(first, second):
    """The same names, dtypes and bytes."""
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor.cpu().view(torch.uint8), second[name].cpu().view(torch.uint8)), name
