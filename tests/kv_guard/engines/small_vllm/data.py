"""Requests of the miniature, and what its scheduler says of them to workers and clients."""

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field


class RequestStatus(enum.IntEnum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()


def chain_hashes(tokens: Sequence[int], page_size: int, salt: str = "") -> list[bytes]:
    hashes, last = [], salt.encode()
    for first in range(0, len(tokens) - page_size + 1, page_size):
        last = hashlib.sha256(last + repr(list(tokens[first : first + page_size])).encode()).digest()
        hashes.append(last)
    return hashes


class Request:
    def __init__(self, request_id: str, prompt: Sequence[int], max_tokens: int, hashed: int | None, client_index=0):
        self.request_id, self.client_index, self.max_tokens = request_id, client_index, max_tokens
        self.all_token_ids, self.num_prompt_tokens = list(prompt), len(prompt)
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = self.num_in_flight_tokens = self.num_output_placeholders = 0
        self.num_stale_tokens = 0
        self.trace_headers = None
        self._hashed = hashed
        self.block_hashes: list[bytes] = []
        self.append([])

    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self):
        return self.num_tokens - self.num_prompt_tokens

    def append(self, tokens):
        self.all_token_ids.extend(tokens)
        if self._hashed is not None:
            self.block_hashes = chain_hashes(self.all_token_ids, self._hashed)

    def is_finished(self):
        return self.status > RequestStatus.PREEMPTED

    def get_finished_reason(self):
        return {"FINISHED_STOPPED": "stop", "FINISHED_LENGTH_CAPPED": "length"}.get(self.status.name, "error")

    def take_events(self):
        return None


@dataclass
class NewRequestData:
    req_id: str
    prompt_token_ids: list[int]
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    prefill_token_ids: list[int] | None = None


@dataclass
class CachedRequestData:
    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_req_ids: set[str]
    preempted_req_ids: set[str]


@dataclass
class EngineCoreOutput:
    request_id: str
    new_token_ids: list[int]
    finish_reason: object = None
    events: object = None
    trace_headers: object = None
    error: object = None


@dataclass
class EngineCoreOutputs:
    outputs: list[EngineCoreOutput] = field(default_factory=list)


@dataclass(frozen=True)
class RequestError:
    code: str
    message: str
    retryable: bool = False
