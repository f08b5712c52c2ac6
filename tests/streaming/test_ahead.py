"""Making things ahead: order, errors, and how many are alive."""

import threading
import weakref

import pytest

from quantkit.streaming.ahead import ahead


class Thing:
    def __init__(self, number):
        self.number = number


def test_things_come_in_order_and_two_are_alive():
    alive, most = weakref.WeakSet(), 0

    def make(number):
        thing = Thing(number)
        alive.add(thing)
        return thing

    seen = []
    for thing in ahead(lambda n=number: make(n) for number in range(20)):
        seen.append(thing.number)
        most = max(most, len(alive))
        del thing
    assert seen == list(range(20))
    assert most <= 2


def test_the_next_is_made_while_the_present_is_used():
    started = threading.Event()
    made = ahead([lambda: 1, started.set])
    assert next(made) == 1
    assert started.wait(10)


def test_an_error_comes_in_its_place_and_ends_it():
    made = []

    def fail():
        raise ValueError("third")

    def make(number):
        return lambda: made.append(number)

    stream = ahead([make(0), make(1), fail, make(3), make(4)])
    next(stream)
    next(stream)
    with pytest.raises(ValueError, match="third"):
        next(stream)
    assert 4 not in made


def test_nothing_is_made_of_nothing():
    assert list(ahead([])) == []
