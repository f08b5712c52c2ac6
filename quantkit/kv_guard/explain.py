"""Incidents in words, for `quantkit kv-guard explain`: when, who, where, what was expected and what was there."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantkit.kv_guard.faults import MOMENTS, Fault, in_words
from quantkit.kv_guard.incidents import time_of

_OF_A_STEP = {"before_step": "before", "after_step": "after"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFault:
    """One fault in one step: a line of the file, or two where it was seen both before and after the step."""

    incident: dict[str, Any]
    is_seen_twice: bool = False

    @property
    def text(self) -> str:
        """One sentence."""
        step, check = self.incident["step"], self.incident["check"]
        moment = f"step {step}, {MOMENTS[check]}"
        if check in _OF_A_STEP:
            moment = f"{'before and after' if self.is_seen_twice else _OF_A_STEP[check]} step {step}"
        return f"{time_of(self.incident):%Y-%m-%dT%H:%M:%SZ}, {moment}, {_what(self.incident)}"


def found_faults(incidents: Sequence[dict[str, Any]]) -> list[FoundFault]:
    """In the order in which they were seen first."""
    found: list[FoundFault] = []
    open_ones: dict[str, int] = {}  # seen before a step, and not yet after it
    for incident in incidents:
        key = json.dumps([incident[name] for name in ("pool", "step", "request", "row", "index", "page", "fault")])
        if incident["check"] == "after_step" and key in open_ones:
            at = open_ones.pop(key)
            found[at] = replace(found[at], is_seen_twice=True)
            continue
        if incident["check"] == "before_step":
            open_ones[key] = len(found)
        found.append(FoundFault(incident=incident))
    return found


def explanation(incident: dict[str, Any]) -> str:
    """Of one line."""
    return FoundFault(incident=incident).text


def _what(incident: Mapping[str, Any]) -> str:
    fault = Fault(incident["fault"])
    index, expected, found = incident["index"], incident["expected"], incident["found"]
    place = f"page {incident['page']}" if index is None else f"logical page {index}, page {incident['page']}"
    wrong = in_words(fault, incident["request"], incident["row"], place, separator=": ")
    if fault is Fault.ROW_TAKEN:  # no page was compared
        return wrong
    wanted = "nothing" if expected is None else f"generation {expected['generation']} of owner {expected['owner']}"
    was = "free" if found["index"] is None else f"logical page {found['index']} of owner {found['owner']}"
    return f"{wrong}; expected {wanted}, found generation {found['generation']}, {was}"
