"""In which order steps are drawn."""

from collections import deque

from quantkit.threads import FollowUps, Step


def test_the_first_of_the_feeds_in_turns_has_two_turns_in_a_round():
    drawn: list[str] = []

    def step_of(name: str) -> Step:
        return lambda: lambda: drawn.append(name)

    feeds = deque(iter([step_of(f"{name}{number}") for number in range(3)]) for name in "abc")
    more = FollowUps(feeds=feeds, width=2)
    more.work.append(step_of("single"))
    while (step := more.next_work()) is not None:
        step()()
    assert drawn == ["single", "a0", "b0", "a1", "a2", "b1", "b2", "c0", "c1", "c2"]
