"""The kinds of faults that are injected, by their number in the taxonomy, and when each can be seen."""

from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.kv_guard.simulation.faults import copies, early, forks, lifetime, sharing, tables
from quantkit.kv_guard.simulation.faults.scripts import Script

_ALL = ("pages", "tokens", "window", "null pages", "waiting")
_OVERLAPPED = ("pages", "tokens", "window", "null pages")
_HOST = ("pages", "tokens", "waiting")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """``worlds`` are the shapes in which it can happen. A fault of the content only a checksum sees. One that
    must be seen ahead (of each step that reads what it spoils) is late where a step's checks see it first."""

    name: str
    script: Script
    worlds: tuple[str, ...] = _ALL
    is_content: bool = False
    is_ahead: bool = False


KINDS: Mapping[str, Kind] = {
    "1": Kind(name="a transfer lands in pages that were released before it", script=lifetime.late_transfer),
    "2": Kind(name="a page is refilled while a step still writes it", script=lifetime.stale_write, worlds=_OVERLAPPED),
    "3": Kind(
        name="a page leaves the window while a step reads it",
        script=lifetime.early_prune,
        worlds=("window", "null pages"),
    ),
    "4": Kind(name="a row is rewritten, or keeps an old tail", script=tables.stale_row, worlds=_OVERLAPPED),
    "6": Kind(name="a page is released twice", script=lifetime.double_free, is_ahead=True),
    "7": Kind(name="a prefix is evicted between look-up and lock", script=sharing.stolen_prefix),
    "8": Kind(name="a retracted prefill frees cached pages", script=sharing.freed_by_retraction),
    "9": Kind(
        name="a cancelled speculation undoes a shared prefix",
        script=sharing.cancelled_under_a_prefix,
        worlds=("pages", "tokens"),
    ),
    "10": Kind(name="a row is off by a page", script=tables.off_by_one),
    "11": Kind(name="padding is written or read as data", script=tables.padding),
    "13": Kind(name="a transfer is torn", script=copies.torn, worlds=_OVERLAPPED, is_content=True, is_ahead=True),
    "14": Kind(
        name="the host's page is reused during load-back", script=copies.host_page_reused, worlds=_HOST, is_ahead=True
    ),
    "early": Kind(
        name="a request reads pages whose transfer has not ended", script=early.early_reader, worlds=_OVERLAPPED
    ),
    "fork": Kind(name="a fork writes in its parent's page, or copies one that is free", script=forks.wrong_fork),
    "bit": Kind(
        name="a bit turns over in transit", script=copies.bit_flip, worlds=_OVERLAPPED, is_content=True, is_ahead=True
    ),
}
