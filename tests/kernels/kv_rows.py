"""Values, slots and caches for the tests of FP8 KV rows."""

import torch

from tests.kernels.compare import poisoned

SPECIAL = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 448.0, 464.0, -465.0, 3e38, -1e-40, 2.0**-10, 1e-30]


def same(got, wanted):
    """Equal bytes, whatever they mean."""
    assert got.dtype == wanted.dtype
    return torch.equal(got.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def rows(num_tokens, num_cols, dtype, device, seed=0):
    """Random values of many magnitudes, and in the first rows what is special."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((num_tokens, num_cols), generator=generator)
    values = values * torch.exp2(torch.randint(-20, 12, (num_tokens, 1), generator=generator))
    if num_tokens > 4:
        values[0] = 0.0
        values[1, : len(SPECIAL)] = torch.tensor(SPECIAL)
        values[2, :4] = float("nan")
        values[3] = 2.0**-130 if dtype == torch.bfloat16 else 2.0**-24
    return values.to(dtype).to(device)


def some_slots(num_tokens, num_slots, device, dtype=torch.int64, seed=0):
    """Distinct, in no order; the last two are no slots of the cache."""
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))[:num_tokens].to(dtype)
    if num_tokens > 4:
        slots[-1], slots[-2] = -1, num_slots
    return slots.to(device)


def both(shape, device):
    """A cache for the kernel and one for the twin, of 0xA5, each between rows or pages of its own."""
    wide = (shape[0] + 2, *shape[1:])
    return poisoned(wide, torch.uint8, device)[1:-1], poisoned(wide, torch.uint8, device)[1:-1]
