"""Pools of tagged pages: one for the kernels, one for the twins, what must agree, and seals in Python's integers."""

from collections import Counter
from dataclasses import dataclass, field

import torch

from quantkit_kernels import kv_tags, reference
from quantkit_kernels.kv_tag_arrays import Captured, Expectations, PageTags, Ring
from tests.kernels.compare import poisoned

WORD = (1 << 64) - 1
GUARD = 32  # elements before and behind each array that nobody may touch


def numbers(values, device, dtype=torch.int64):
    return torch.tensor(list(values), dtype=dtype, device=device)


def mix(x):
    """The finalizer of splitmix64, as its authors print it."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def seal_of(generation, owner, index):
    """Of unsigned numbers."""
    return mix((mix(mix(generation & WORD) ^ (owner & WORD)) + index) & WORD)


def stored_seal(generation, owner, index, page):
    return seal_of(generation, owner, index) ^ mix(page + 0x51ED2705)


def signed(number):
    return (number & WORD) - (1 << 64) * (number >> 63 & 1)


@dataclass
class Pool:
    """``wholes`` are the arrays with what lies around them."""

    wholes: dict[str, torch.Tensor] = field(default_factory=dict)
    arrays: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, name, shape, dtype, device, value=None):
        count = torch.Size(shape).numel()
        whole = poisoned((count + 2 * GUARD,), dtype, device)
        self.wholes[name], self.arrays[name] = whole, whole[GUARD : GUARD + count].view(shape)
        if value is not None:
            self.arrays[name].copy_(value)

    def __getattr__(self, name):
        return self.arrays[name]

    @property
    def tags(self):
        return PageTags(seals_P=self.seals_P, records_P3=self.records_P3, states_P=self.states_P)

    @property
    def expectations(self):
        return Expectations(seals_RL=self.seals_RL, details_RL2=self.details_RL2, openings_R=self.openings_R)

    @property
    def captured(self):
        return Captured(pages_BL=self.pages_BL, seals_BL=self.seals_BL, openings_B=self.openings_B)

    @property
    def ring(self):
        return Ring(lines_KW=self.lines_KW, count_1=self.count_1)

    @property
    def lines(self):
        """Those that had room."""
        return [tuple(line) for line in self.lines_KW[: min(int(self.count_1), self.ring.num_lines)].tolist()]

    def run(self, module, op, *arguments, captured=False, **options):
        own = {"tags": self.tags, "expectations": self.expectations, "ring": self.ring}
        if op == "release_pages":
            del own["expectations"]
        if op == "check_captured":
            own["captured"] = self.captured
        if captured:
            options["captured"] = self.captured
        getattr(module, op)(*own.values(), *arguments, **options)


def new_pool(device, *, num_pages, num_rows=4, most_pages=8, num_lines=64, batch=8):
    """Zeros, as in a guard; captured pages and lines are whatever lay there."""
    pool, word = Pool(), torch.int64
    pool.add("seals_P", (num_pages,), word, device, 0)
    pool.add("records_P3", (num_pages, 3), word, device, 0)
    pool.add("states_P", (num_pages,), torch.int32, device, 0)
    pool.add("seals_RL", (num_rows, most_pages), word, device, 0)
    pool.add("details_RL2", (num_rows, most_pages, 2), word, device, 0)
    pool.add("openings_R", (num_rows,), word, device, torch.arange(70, 70 + num_rows))
    pool.add("openings_B", (batch,), word, device)
    pool.add("pages_BL", (batch, most_pages), torch.int32, device)
    pool.add("seals_BL", (batch, most_pages), word, device)
    pool.add("lines_KW", (num_lines + 1, 16), word, device)
    pool.add("count_1", (1,), word, device, 0)
    return pool


class Both:
    """A pool for the kernels, and the same for the twins, whose ring has room for everything."""

    def __init__(self, device, *, num_lines=64, **sizes):
        self.got = new_pool(device, num_lines=num_lines, **sizes)
        self.wanted = new_pool(device, num_lines=4096, **sizes)

    def run(self, op, *arguments, **options):
        self.got.run(kv_tags, op, *arguments, **options)
        self.wanted.run(reference, op, *arguments, **options)
        self.check()

    def change(self, name, at, value):
        for pool in (self.got, self.wanted):
            pool.arrays[name][at] = value

    def check(self):
        """Equal bytes; all violations counted, a line for each that has room, and nothing else touched."""
        got, wanted = self.got, self.wanted
        for name in got.arrays.keys() - {"lines_KW"}:
            assert torch.equal(got.arrays[name], wanted.arrays[name]), name
        expected, kept = Counter(wanted.lines), Counter(got.lines)
        assert sum(expected.values()) == int(got.count_1), "the twin's ring is too small"
        assert kept <= expected, kept - expected
        assert sum(kept.values()) == min(got.ring.num_lines, int(got.count_1))
        assert is_poisoned(got.lines_KW[sum(kept.values()) :])
        assert all(is_poisoned(whole[:GUARD]) and is_poisoned(whole[-GUARD:]) for whole in got.wholes.values())


def is_poisoned(array):
    return bool((array.contiguous().view(torch.uint8) == 0xA5).all())
