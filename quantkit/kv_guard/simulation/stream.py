"""In which order things happen on a device: a stream runs what it was given; copies and transfers run beside it."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

Op = Callable[[], object]


@dataclass(slots=True, eq=False)
class Lane:
    """Parts of one transfer: in order among themselves and in none with anything else.

    They may begin when ``may_begin``. From where ``must_run`` comes true on they run, all ``at_once`` or one between
    two operations of a stream.
    """

    parts: deque[Op]
    may_begin: Callable[[], bool]
    must_run: Callable[[], bool] | None = None
    at_once: bool = True
    pages: list[int] = field(default_factory=list)  # that it writes

    @property
    def is_done(self) -> bool:
        return not self.parts


class Beside:
    """Everything that no stream orders."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._lanes: list[Lane] = []

    def add(self, lane: Lane) -> Lane:
        """It runs from now on, whenever it likes."""
        self._lanes.append(lane)
        return lane

    def between(self) -> None:
        """Between two operations of a stream: what must run, and perhaps something else."""
        if not self._lanes:
            return
        for lane in self._lanes:
            if lane.must_run is not None and lane.must_run():
                while lane.parts:
                    lane.parts.popleft()()
                    if not lane.at_once:
                        break
        if self._random.random() < 0.25:
            self._run_one()
        self._lanes = [lane for lane in self._lanes if lane.parts]

    def run_some(self, count: int) -> None:
        """Time passes."""
        for _ in range(count):
            self._run_one()
        self._lanes = [lane for lane in self._lanes if lane.parts]

    def _run_one(self) -> None:
        able = [lane for lane in self._lanes if lane.parts and lane.must_run is None and lane.may_begin()]
        if able:
            self._random.choice(able).parts.popleft()()

    def drop(self) -> None:
        """Nothing of it will happen."""
        self._lanes.clear()


@dataclass(slots=True, eq=False)
class Stream:
    """The host puts operations in; they run later, when the host waits for one."""

    beside: Beside
    num_put: int = 0
    num_run: int = 0
    _ops: deque[Op] = field(default_factory=deque)

    def put(self, op: Op) -> int:
        """The number that has run when this has."""
        self._ops.append(op)
        self.num_put += 1
        return self.num_put

    def run_to(self, number: int) -> None:
        """Wait for an operation."""
        while self.num_run < number:
            self.beside.between()
            self._ops.popleft()()
            self.num_run += 1

    def run_all(self) -> None:
        """Wait for all."""
        self.run_to(self.num_put)
