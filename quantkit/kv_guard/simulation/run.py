"""The self-test: traffic without faults, then each kind of fault alone, then several at once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from quantkit.kv_guard.page_tags import new_tracker
from quantkit.kv_guard.simulation.engine import MakeGuard
from quantkit.kv_guard.simulation.faults.kinds import KINDS
from quantkit.kv_guard.simulation.judge import Injection
from quantkit.kv_guard.simulation.report import KindCount, SelfTestReport
from quantkit.kv_guard.simulation.shapes import LARGE, SMALL, WorldShape
from quantkit.kv_guard.simulation.world import World

_WARM_UP = 4  # ticks of traffic before a fault
_MOST_TICKS = 70  # of a script
_TICKS_OF_A_LIFE = 300  # after which the engines of a run without faults are restarted
_AT_ONCE = 4  # faults


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestPlan:
    """``checks`` of pages without faults; ``single`` and ``combined`` injections of each kind at least. ``content``:
    pages are summed where they are copied, and faults of the content are injected, too. ``only`` these kinds; empty:
    all."""

    seed: int = 0
    checks: int = 100_000
    single: int = 6
    combined: int = 6
    content: bool = False
    only: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those that can be seen."""
        able = (name for name, kind in KINDS.items() if self.content or not kind.is_content)
        return tuple(name for name in able if name in self.only or not self.only)

    def shapes(self, shapes: Mapping[str, WorldShape]) -> dict[str, WorldShape]:
        """With checksums or without."""
        return {name: replace(shape, content=shape.content and self.content) for name, shape in shapes.items()}


Progress = Callable[[str, int, int], None]  # what goes on, what of it was just done, and all of it


def self_test(plan: SelfTestPlan, report: Progress = lambda *_: None) -> SelfTestReport:
    """What the guard makes of it all; the same for the same plan."""
    with one_thread(), torch.inference_mode():
        shapes = LARGE | {f"small, {name}": shape for name, shape in SMALL.items()}
        worlds = clean_worlds(plan.shapes(shapes), plan, report)
        faulty = FaultRun(plan)
        faulty.run(report)
    return _reported(plan, worlds, faulty)


def faults_alone(plan: SelfTestPlan, make_guard: MakeGuard) -> SelfTestReport:
    """What a guard makes of faults, without the traffic that has none."""
    with one_thread(), torch.inference_mode():
        run = FaultRun(plan, make_guard=make_guard)
        run.run()
    return _reported(plan, [], run)


def _reported(plan: SelfTestPlan, clean: Sequence[World], run: "FaultRun") -> SelfTestReport:
    every = [*clean, *run.worlds.values()]
    return SelfTestReport(
        seed=plan.seed,
        kinds=tuple(run.counts.values()),
        checks=sum(world.num_checks for world in every),
        clean_checks=sum(world.num_checks for world in clean),
        steps=sum(world.num_steps for world in every),
        false_positives=tuple(text for world in every for text in world.judge.false_positives),
        leaks=tuple(text for world in every for text in world.judge.leaks),
    )


def clean_worlds(
    shapes: Mapping[str, WorldShape], plan: SelfTestPlan, report: Progress = lambda *_: None
) -> list[World]:
    """Traffic without faults, the checks shared between the shapes."""
    worlds = []
    report("traffic without faults", 0, len(shapes))
    for at, shape in enumerate(shapes.values()):
        world = World(shape, plan.seed + at)
        while world.num_checks * len(shapes) < plan.checks:
            world.tick()
            if world.num_ticks % _TICKS_OF_A_LIFE == 0:
                world.restart()
        world.restart()
        worlds.append(world)
        report("traffic without faults", 1, len(shapes))
    return worlds


class FaultRun:
    """Injects faults, and counts what became of them. Without a guard it shows what they would have done."""

    def __init__(self, plan: SelfTestPlan, *, make_guard: MakeGuard = new_tracker) -> None:
        self._plan = plan
        self.counts = {kind: KindCount(kind=kind) for kind in plan.kinds}
        self.worlds = {
            name: World(shape, plan.seed + 100 + at, make_guard=make_guard)
            for at, (name, shape) in enumerate(plan.shapes(SMALL).items())
        }
        self.injections: list[Injection] = []

    def run(self, report: Progress = lambda *_: None) -> None:
        """As many of each kind as the plan wants, in each of its worlds in turn."""
        report("faults alone", 0, len(self.counts))
        for kind, count in self.counts.items():
            names = KINDS[kind].worlds
            for attempt in range(4 * self._plan.single):
                if count.injected >= self._plan.single:
                    break
                self.inject(self.worlds[names[attempt % len(names)]], [kind])
            report("faults alone", 1, len(self.counts))
        report("faults together", 0, self._num_wanted)
        wanted = self._plan.combined
        for attempt in range(4 * wanted * len(self.counts)):
            kinds = [kind for kind, count in self.counts.items() if count.combined < wanted]
            if not kinds:
                break
            names = KINDS[kinds[attempt % len(kinds)]].worlds
            name, before = names[attempt % len(names)], self._num_wanted
            self.inject(self.worlds[name], self._together(name, kinds, attempt))
            report("faults together", before - self._num_wanted, wanted * len(self.counts))

    @property
    def _num_wanted(self) -> int:
        """Faults beside others that are still missing."""
        return sum(max(self._plan.combined - count.combined, 0) for count in self.counts.values())

    def inject(self, world: World, kinds: Sequence[str]) -> list[Injection]:
        """Begin anew, and let faults happen at once. What lands late is theirs, however late it is."""
        for _ in range(_WARM_UP):
            world.tick()
        injections = [Injection(kind) for kind in kinds]
        world.judge.active = injections
        scripts = [KINDS[one.kind].script(world, one) for one in injections]
        for _ in range(_MOST_TICKS):
            scripts = [script for script in scripts if _goes_on(script)]
            if not scripts and not any(one.is_under_way for one in injections):
                break
            world.tick()
        world.restart()
        world.judge.active = []
        is_combined = sum(one.is_fired for one in injections) > 1
        for injection in injections:
            self.counts[injection.kind].count(injection, is_combined=is_combined)
        self.injections += injections
        return injections

    def _together(self, name: str, wanted: Sequence[str], attempt: int) -> list[str]:
        """Kinds that can happen in a world, those that are wanted most first, each time others."""
        able = [kind for kind in self.counts if name in KINDS[kind].worlds]
        turned = able[attempt % len(able) :] + able[: attempt % len(able)]
        return sorted(turned, key=lambda kind: kind not in wanted)[:_AT_ONCE]


def _goes_on(script: Iterator[None]) -> bool:
    return next(script, "over") != "over"


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors are small here, and threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
