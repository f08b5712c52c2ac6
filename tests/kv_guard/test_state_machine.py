"""A tracker against a model in plain Python: whatever happens, a row passes exactly where it holds what it reads."""

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quantkit.kv_guard.dispatch import twins
from quantkit.kv_guard.identity import PoolIdentity
from quantkit.kv_guard.page_tags import PageTagTracker
from quantkit.kv_guard.settings import GuardSettings, PoolSize
from quantkit.kv_guard.simulation.run import one_thread
from quantkit.kv_guard.tracker import Held, Mode, Step
from tests.kv_guard.pools import numbers

NUM_PAGES, NUM_ROWS, MOST_PAGES, PAGE_SIZE = 14, 4, 5, 4
ROWS = st.integers(0, NUM_ROWS - 1)


class Books(RuleBasedStateMachine):
    """The right books of an engine, and what a broken one would put into its page table.

    ``lives`` numbers each use of a page. A row holds (page, life) pairs; what it reads passes where the table names
    that page, its life has not ended and nothing but its own content lies there. Owners differ from row to row, and
    from place to place. ``events`` are the violations that the books themselves were told of.
    """

    @initialize(first=st.sampled_from([1, (1 << 63) - 9, (1 << 64) - 9]))
    def begin(self, first):
        size = PoolSize(num_pages=NUM_PAGES, page_size=PAGE_SIZE, num_rows=NUM_ROWS, most_pages=MOST_PAGES)
        identity = PoolIdentity(model="tiny", layout="pages of 4")
        self.tracker = PageTagTracker(
            GuardSettings(identity=identity, size=size, mode=Mode.ABORT, first_generation=first)
        )
        self.table = torch.zeros(NUM_ROWS, MOST_PAGES, dtype=torch.int32)
        self.lives = [0] * NUM_PAGES
        self.free = list(range(NUM_PAGES))
        self.rows = {}
        self.cached = []  # what nodes hold: (page, life, index, held)
        self.readers = {}  # of cached pages, by rows
        self.wrong = {}  # entries of the table that are not the row's own: the page that stands there
        self.places = {}  # owner and logical index of each (page, life)
        self.has_transfers = False
        self.waiting, self.empty = {}, set()  # transfers, by pages that they may write; those that none has begun
        self.struck = set()  # of those that wait: where a token was stored
        self.landed = {}  # owner and index of tags that lie where nobody has taken them for his own
        self.gone = {}  # transfers by pages that were released while they waited
        self.touched = set()  # (page, life) that began where a transfer may write
        self.spoiled = (
            set()
        )  # (page, life) where a token was stored, or a tag had landed; a transfer brings new content
        self.reserved = {}  # what is expected of a copy, by pages
        self.events = set()
        self.count = 0

    def _open(self, row):
        self.count += 1
        self.rows[row] = []
        self.tracker.open(row, f"r{self.count}")
        self.wrong = {place: page for place, page in self.wrong.items() if place[0] != row}

    def _new_pages(self, count, row=None, first=None):
        """For logical pages of a row, or to be reserved."""
        taken, self.free = self.free[:count], self.free[count:]
        for at, page in enumerate(taken):
            self.lives[page] += 1
            if self.gone.get(page) or (self.has_transfers and page in self.landed):
                self.touched.add((page, self.lives[page]))
                self.events.add((row, None if row is None else first + at, "landing"))
            self.landed.pop(page, None)
        return taken

    def _is_whole(self, page, life):
        """What lies there is what was granted, or what has arrived for it."""
        is_there = page not in self.landed and page not in self.empty
        return self.lives[page] == life and is_there and (page, life) not in self.spoiled | self.touched

    def _over(self, page):
        """Released, or given up by a move."""
        if page in self.waiting:
            self.events.add((None, None, "landing"))
            self.gone.setdefault(page, set()).add(self.waiting.pop(page))
        self.struck.discard(page)
        self.empty.discard(page)
        self.landed.pop(page, None)
        self.lives[page] += 1

    def _write(self, row, index, page):
        self.table[row, index] = page
        self.wrong.pop((row, index), None)

    def _release(self, pages):
        if pages:
            self.tracker.release(numbers(*pages))
            for page in pages:
                self._over(page)
            self.free += pages

    def _own(self, row, first=0):
        """Pages that no node holds."""
        cached = {(page, life) for page, life, _, _ in self.cached}
        return [page for page, life in self.rows[row][first:] if (page, life) not in cached]

    @rule(row=ROWS, count=st.integers(1, 3))
    def grant(self, row, count):
        if row not in self.rows:
            self._open(row)
        first = len(self.rows[row])
        pages = self._new_pages(min(count, MOST_PAGES - first, len(self.free)), row, first)
        if pages:
            indices = list(range(first, first + len(pages)))
            owners = [1_000 * self.count + 10 * row + index for index in indices]
            self.tracker.grant(numbers(*pages), numbers(*[row] * len(pages)), numbers(*indices), numbers(*owners))
            for index, page, owner in zip(indices, pages, owners, strict=True):
                self.rows[row].append((page, self.lives[page]))
                self.places[page, self.lives[page]] = owner, index
                self._write(row, index, page)

    def _name(self, row, index, page, life):
        """Who passes on what is not his is named."""
        if not self._is_whole(page, life):
            self.events.add((row, index, "holder"))

    @precondition(lambda self: any(self.rows.values()))
    @rule(data=st.data())
    def cache(self, data):
        """The first pages of a row become a node's: only whole prefixes that begin with its own first page."""
        row = data.draw(st.sampled_from([row for row, pages in self.rows.items() if pages]))
        known = {(page, life) for page, life, _, _ in self.cached}
        index = next((at for at, place in enumerate(self.rows[row]) if place not in known), None)
        if index is not None:
            page, life = self.rows[row][index]
            if self.lives[page] != life:
                return
            self._name(row, index, page, life)
            held = self.tracker.cache(numbers(page), numbers(row), numbers(index))
            self.cached.append((page, life, index, held))

    @precondition(lambda self: self.cached)
    @rule(row=ROWS, data=st.data())
    def share(self, row, data):
        """A row begins with what a node holds; one that was evicted since is a fault of the engine's."""
        firsts = [one for one in self.cached if one[2] == 0]
        if row in self.rows or not firsts:
            return
        page, life, _, held = data.draw(st.sampled_from(firsts))
        self._open(row)
        self.tracker.share(numbers(row), numbers(0), held)
        self.rows[row] = [(page, life)]
        self._write(row, 0, page)

    @precondition(lambda self: self.cached)
    @rule(data=st.data(), keeps_node=st.booleans())
    def evict(self, data, keeps_node):
        """A node's page is released, whoever reads it. A broken cache still hands it out."""
        one = data.draw(st.sampled_from(self.cached))
        page, life = one[:2]
        if self.lives[page] == life:
            self._release([page])
        if not keeps_node:
            self.cached.remove(one)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), keep=st.integers(0, MOST_PAGES))
    def truncate(self, data, keep):
        row = data.draw(st.sampled_from(sorted(self.rows)))
        if keep < len(self.rows[row]):
            alive = [page for page, life in self.rows[row][keep:] if self.lives[page] == life]
            own = [page for page in self._own(row, keep) if page in alive]
            self.tracker.truncate(numbers(row), numbers(keep))
            del self.rows[row][keep:]
            self._release(own)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def end(self, data):
        row = data.draw(st.sampled_from(sorted(self.rows)))
        alive = {page for page, life in self.rows[row] if self.lives[page] == life}
        own = [page for page in self._own(row) if page in alive]
        self.tracker.close(row)
        del self.rows[row]
        self._release(own)

    @precondition(lambda self: self.rows and self.free)
    @rule(data=st.data())
    def move(self, data):
        row = data.draw(st.sampled_from(sorted(self.rows)))
        own = set(self._own(row))
        able = [at for at, (page, life) in enumerate(self.rows[row]) if page in own and self.lives[page] == life]
        if able:
            index = data.draw(st.sampled_from(able))
            source, life = self.rows[row][index]
            self._name(row, index, source, life)
            (target,) = self._new_pages(1, row, index)
            self.tracker.move(numbers(source), numbers(target), numbers(row), numbers(index))
            self.rows[row][index] = target, self.lives[target]
            self.places[target, self.lives[target]] = self.places[source, life]
            if not self._is_whole(source, life):
                self.spoiled.add((target, self.lives[target]))
            self._over(source)
            self.free.append(source)
            self._write(row, index, target)

    @precondition(lambda self: self.rows and len(self.rows) < NUM_ROWS)
    @rule(data=st.data(), to_row=ROWS)
    def fork(self, data, to_row):
        row = data.draw(st.sampled_from(sorted(self.rows)))
        if to_row in self.rows:
            return
        known = {(page, life) for page, life, _, _ in self.cached}
        count = next((at for at, place in enumerate(self.rows[row]) if place not in known), len(self.rows[row]))
        self._open(to_row)
        self.tracker.fork(row, to_row, numbers(*[page for page, _ in self.rows[row][:count]]))
        self.rows[to_row] = self.rows[row][:count]
        for index, (page, life) in enumerate(self.rows[to_row]):
            self._name(to_row, index, page, life)
            self._write(to_row, index, page)

    @precondition(lambda self: any(self.rows.values()))
    @rule(data=st.data())
    def announce(self, data):
        """A page that no node holds."""
        row = data.draw(st.sampled_from([row for row, pages in self.rows.items() if pages]))
        own = [page for page in self._own(row) if (page, self.lives[page]) in self.rows[row]]
        if own:
            page = data.draw(st.sampled_from(own))
            self.count += 1
            self.tracker.announce(numbers(page), self.count)
            self.has_transfers = True
            if page in self.waiting:
                self.events.add((None, None, "announcement"))
                self.gone.setdefault(page, set()).add(self.count)
                self.touched.add((page, self.lives[page]))
                return
            self.waiting[page] = self.count
            if self.landed.pop(page, None):
                self.spoiled.add((page, self.lives[page]))
                self.empty.add(page)
            elif (page, self.lives[page]) not in self.spoiled | self.touched:
                self.empty.add(page)

    @precondition(lambda self: self.free)
    @rule()
    def reserve(self):
        (page,) = self._new_pages(1)
        self.has_transfers = True
        self.count += 1
        self.tracker.reserve(numbers(page), self.count)
        self.reserved[page] = self.places[page, self.lives[page]] = 1_000 * self.count + 999, 0
        self.waiting[page] = self.count
        self.empty.add(page)

    @precondition(lambda self: self.has_transfers)
    @rule(page=st.integers(0, NUM_PAGES - 1), is_right=st.booleans())
    def land(self, page, is_right):
        """What was sent for the page as it is now, or somebody's; announced, or late."""
        owner, index = self.places.get((page, self.lives[page]), (7, 0)) if is_right else (7, 0)
        record = numbers(3 + self.count, owner, index)
        seal = twins.record_seals(record[None]) ^ twins.mark_of(numbers(5))
        self.tracker.land(numbers(page), torch.cat((seal, record))[None])
        self.landed[page] = owner, index
        self.empty.discard(page)

    @precondition(lambda self: self.has_transfers and any(self.rows.values()))
    @rule(data=st.data())
    def arrive(self, data):
        row = data.draw(st.sampled_from([row for row, pages in self.rows.items() if pages]))
        index = data.draw(st.integers(0, len(self.rows[row]) - 1))
        page, life = self.rows[row][index]
        if self.lives[page] == life:
            self.tracker.arrive(numbers(page), numbers(row), numbers(index))
            self._arrived(page, self.places[page, life], row, index)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def store(self, data):
        page = data.draw(st.sampled_from(sorted(self.reserved)))
        owner, index = place = self.reserved.pop(page)
        sent = Held(generations=numbers(1), owners=numbers(owner), indices=numbers(index))
        held = self.tracker.store(numbers(page), sent)
        self._arrived(page, place)
        self.cached.append((page, self.lives[page], index, held))

    def _arrived(self, page, place, row=None, index=None):
        """What has come is the page's own if it is what was sent for it."""
        if page in self.struck:
            self._strike(page)
        if page in self.landed and self.landed[page] == place:
            del self.landed[page]
            self.spoiled.discard((page, self.lives[page]))
        else:
            self.events.add((row, index, "arrival"))
        self.waiting.pop(page, None)

    def _strike(self, page):
        """Whatever has landed there, it is spoiled."""
        self.struck.discard(page)
        self.landed.pop(page, None)

    @precondition(lambda self: self.waiting or any(self.gone.values()))
    @rule(data=st.data())
    def drained(self, data):
        """One transfer to a page is over, whoever has it now; others are not."""
        under_way = [(page, transfer) for page, transfer in self.waiting.items()]
        under_way += [(page, transfer) for page, transfers in self.gone.items() for transfer in transfers]
        page, transfer = data.draw(st.sampled_from(sorted(under_way)))
        self.tracker.drained(numbers(page), transfer)
        self.gone.get(page, set()).discard(transfer)
        if self.waiting.get(page) == transfer:
            del self.waiting[page]
            if page in self.struck:
                self._strike(page)
            if page not in self.reserved:  # there is nobody who could fill it instead
                self.empty.discard(page)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), page=st.integers(0, NUM_PAGES - 1))
    def strike(self, data, page):
        """A token of a row's first page is stored in a page of another, or of nobody, or in a shared one."""
        row = data.draw(st.sampled_from(sorted(self.rows)))
        own = self.rows[row][:1]
        if (page, self.lives[page]) in own:
            return
        self.tracker.check_writes(numbers(page * PAGE_SIZE), numbers(row), numbers(0))
        self.events.add((row, 0, "write"))
        self.landed.pop(page, None)
        self.empty.discard(page)
        self.spoiled.add((page, self.lives[page]))
        if page in self.waiting:
            self.struck.add(page)
        if own:  # where the token should be is a hole, which nothing fills
            self.rows[row][0] = own[0][0], -1

    @rule()
    def clear(self):
        self.tracker.clear()
        self.rows, self.cached, self.wrong, self.reserved = {}, [], {}, {}
        self.free = list(range(NUM_PAGES))
        for page in self.free:
            self._over(page)

    @precondition(lambda self: any(self.rows.values()))
    @rule(data=st.data(), page=st.integers(-1, NUM_PAGES))
    def break_the_table(self, data, page):
        """An entry names another page, one that the pool does not have, or by chance the right one."""
        row = data.draw(st.sampled_from([row for row, pages in self.rows.items() if pages]))
        index = data.draw(st.integers(0, len(self.rows[row]) - 1))
        self.table[row, index] = page
        self.wrong[row, index] = page

    @invariant()
    def a_row_passes_where_it_holds_what_it_reads(self):
        rows = [row for row, pages in self.rows.items() if pages]
        if not rows:
            return
        lengths = [len(self.rows[row]) * PAGE_SIZE for row in rows]
        most = max(len(self.rows[row]) for row in rows)
        number = self.tracker.before_step(
            Step(table=self.table, rows=numbers(*rows), lengths=numbers(*lengths), most_pages=most)
        )
        self.tracker.after_step()
        found = {(one.row, one.evidence.index, one.check) for one in self.tracker.verdict(number).violations}
        expected, self.events = self.events, set()
        for row in rows:
            for index, (page, life) in enumerate(self.rows[row]):
                read = self.wrong.get((row, index), page)
                if read != page or not self._is_whole(page, life):
                    expected |= {(row, index, "before_step")}
                    expected |= {(row, index, "after_step")} if read != -1 else set()  # no page, and named before
        assert found == expected


TestBooks = Books.TestCase
TestBooks.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield
