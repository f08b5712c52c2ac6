"""A tracker with a page table that tests fill by hand."""

from dataclasses import fields, is_dataclass

import torch

from quantkit.kv_guard.identity import PoolIdentity, owner_of
from quantkit.kv_guard.page_tags import PageTagTracker
from quantkit.kv_guard.settings import GuardSettings, PoolSize
from quantkit.kv_guard.tracker import Mode, Step

IDENTITY = PoolIdentity(model="tiny", layout="mla-656, pages of 4")
PAGE_SIZE = 4


def numbers(*values):
    return torch.tensor(values, dtype=torch.int64)


class Pool:
    """A tracker with a page table that tests fill by hand."""

    def __init__(self, *, mode=Mode.ABORT, num_pages=16, null_page=-1, **settings):
        size = PoolSize(num_pages=num_pages, page_size=PAGE_SIZE, num_rows=4, most_pages=4, null_page=null_page)
        settings = {"secret": b"of two sides"} | settings
        self.tracker = PageTagTracker(GuardSettings(identity=IDENTITY, size=size, mode=mode, **settings))
        self.table = torch.zeros(4, 4, dtype=torch.int32)
        self.lengths = [0] * 4
        self.by_token = False

    def owners(self, tokens, request):
        return numbers(*[owner_of(chain) for chain in self.tracker.chains.of_prompt(tokens, PAGE_SIZE, request)])

    def begin(self, row, tokens, pages, *, request=None):
        """A request whose whole prompt is new."""
        self.tracker.open(row, request or f"r{row}")
        indices = torch.arange(len(pages))
        self.tracker.grant(
            numbers(*pages), torch.full_like(indices, row), indices, self.owners(tokens, request or f"r{row}")
        )
        self.table[row, : len(pages)] = torch.tensor(pages)
        self.lengths[row] = len(tokens)

    def end(self, row, *pages):
        """Its request is over, and gives its pages back."""
        self.tracker.close(row)
        self.tracker.release(numbers(*pages))

    def step(self, *rows):
        """The batch of some rows."""
        return Step(
            table=self.table,
            rows=numbers(*rows),
            lengths=numbers(*[self.lengths[row] for row in rows]),
            most_pages=max(-(-self.lengths[row] // PAGE_SIZE) for row in rows),
            by_token=self.by_token,
        )

    def launch(self, *rows):
        return self.tracker.before_step(self.step(*rows))

    def run(self, *rows):
        step = self.launch(*rows)
        self.tracker.after_step()
        return self.tracker.verdict(step)


def arrays_in(things):
    """Tensors among objects and within dataclasses, each once."""
    found = {}
    for one in things:
        inner = [getattr(one, field.name) for field in fields(one)] if is_dataclass(one) else []
        found |= {id(array): array for array in ([one] if isinstance(one, torch.Tensor) else arrays_in(inner))}
    return list(found.values())


def faults(verdict):
    return [(one.fault, one.check, one.request, one.evidence.page) for one in verdict.violations]
