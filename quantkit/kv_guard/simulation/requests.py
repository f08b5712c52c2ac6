"""Requests, whose tokens are settled from the start, and the traffic that brings them."""

from dataclasses import dataclass, field
from enum import Enum, auto
from random import Random
from typing import TYPE_CHECKING

from torch import Tensor

from quantkit.kv_guard.identity import Chain, Chains, owner_of
from quantkit.kv_guard.simulation.content import words_of
from quantkit.kv_guard.simulation.shapes import EngineShape

if TYPE_CHECKING:
    from quantkit.kv_guard.simulation.tree import Node


class State(Enum):
    """Where a request is."""

    WAITING = auto()
    LOADING = auto()  # its prefix comes from the host's memory
    ARRIVING = auto()  # its pages come from the engine that prefills
    PREFILL = auto()
    DECODE = auto()
    SENDING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """``tokens`` has all that it will ever have, and some that it will not need; the host knows the first ``known``."""

    name: str
    tokens: list[int]
    num_prompt: int
    total: int  # at which it ends
    words: Tensor  # of its tokens
    drafts: int = 0
    forks: int = 0
    source: "Request | None" = None  # what prefills for it
    state: State = State.WAITING
    known: int = 0
    computed: int = 0  # tokens whose KV is there, as far as the host has seen
    launched: int = 0  # tokens of the prompt that steps were launched for
    device_known: int = 0  # what the device knows when the steps in flight are done
    in_flight: int = 0
    epoch: int = 0  # results of a former life are dropped
    row: int = 0
    pages: list[int] = field(default_factory=list)
    num_shared: int = 0  # of them, the first, the cache holds
    num_pruned: int = 0
    node: "Node | None" = None  # of the cache, which must stay
    chains: list[Chain] = field(default_factory=list)  # of the pages whose tokens are known

    def owner(self, chains: Chains, page_size: int, index: int) -> int:
        """Of a logical page that is granted now."""
        while len(self.chains) <= index and (len(self.chains) + 1) * page_size <= self.known:
            first = len(self.chains) * page_size
            before = self.chains[-1] if self.chains else chains.start()
            self.chains.append(chains.behind(before, self.tokens[first : first + page_size]))
        if index < len(self.chains):
            return owner_of(self.chains[index])
        before = self.chains[-1] if self.chains else chains.start()
        return owner_of(chains.branch(before, self.name, index))

    def page_keys(self, page_size: int, count: int) -> list[tuple[int, ...]]:
        """Tokens of the first pages."""
        return [tuple(self.tokens[at : at + page_size]) for at in range(0, count * page_size, page_size)]


class Traffic:
    """Prompts share their beginnings, go on from earlier answers, or are new."""

    def __init__(self, shape: EngineShape, random: Random) -> None:
        self._shape = shape
        self._random = random
        self._count = 0
        longest = shape.most_tokens // 2
        self._beginnings = [self._tokens(random.randint(1, longest)) for _ in range(6)]
        for beginning in self._beginnings[:3]:  # the boundary is where engines go wrong
            del beginning[max(1, len(beginning) // shape.page_size) * shape.page_size :]
        self._answered: list[list[int]] = []

    def request(self) -> Request:
        """The next one."""
        random, most = self._random, self._shape.most_tokens
        kind = random.random()
        if kind < 0.25 and self._answered:
            prompt = list(random.choice(self._answered))
        elif kind < 0.85:
            prompt = list(random.choice(self._beginnings))
        else:
            prompt = []
        prompt = prompt[: most - 12] + self._tokens(random.randint(1, max(2, most // 5)))
        prompt = prompt[: most - 8]
        num_outputs = random.randint(2, max(3, min(most - len(prompt), most // 3)))
        forks = random.choice((1, 2)) if random.random() < 0.1 else 0
        return self.made(prompt, num_outputs, forks=forks)

    def made(self, prompt: list[int], num_outputs: int, *, forks: int = 0) -> Request:
        """With outputs nobody else has."""
        self._count += 1
        total = len(prompt) + num_outputs
        width = self._shape.most_pages * self._shape.page_size
        tokens = prompt + self._tokens(width - len(prompt))
        drafts = self._random.choice((0, self._shape.drafts))
        return Request(
            name=f"r{self._count}",
            tokens=tokens,
            num_prompt=len(prompt),
            total=total,
            words=words_of(tokens, width),
            drafts=drafts,
            forks=forks,
            known=len(prompt),
            device_known=len(prompt),
        )

    def forked(self, parent: Request) -> Request:
        """The same prompt, another answer."""
        return self.made(parent.tokens[: parent.num_prompt], parent.total - parent.num_prompt)

    def answered(self, request: Request) -> None:
        """Somebody may go on from there."""
        if request.total < self._shape.most_tokens * 3 // 5:
            self._answered = [*self._answered[-7:], request.tokens[: request.total]]

    def _tokens(self, count: int) -> list[int]:
        return [self._random.getrandbits(17) for _ in range(count)]
