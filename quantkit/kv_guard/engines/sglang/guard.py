"""The guard of a process: nothing until the model's pools exist, then one pool, and the steps that run on it."""

import hashlib
import importlib
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from quantkit.kv_guard.engines.logbook import Logbook
from quantkit.kv_guard.engines.refusals import Refusals
from quantkit.kv_guard.engines.settings import PluginSettings, check_memory
from quantkit.kv_guard.engines.sglang.condemned import Condemned
from quantkit.kv_guard.engines.sglang.inbox import Inbox
from quantkit.kv_guard.engines.sglang.installed import check_installed
from quantkit.kv_guard.engines.sglang.kept_pages import KeptPages
from quantkit.kv_guard.engines.sglang.pool import GuardedPool
from quantkit.kv_guard.engines.sglang.supported import (
    ALLOCATORS,
    ROW_POOLS,
    TREES,
    check_class,
    check_model,
    check_options,
    check_secret,
    check_transfers,
    check_unused,
)
from quantkit.kv_guard.engines.sglang.targets import ROOT
from quantkit.kv_guard.identity import PoolIdentity
from quantkit.kv_guard.settings import PoolSize
from quantkit.kv_guard.tracker import KvGuardError

_log = logging.getLogger(__name__)


class Guard:
    """What the hooks of one process share. ``originals`` are the hooked functions by name, from before they were.

    All hooks run in the scheduler's thread, which also launches steps, but for one that tells the tracker nothing:
    `transfers.paired`, in the threads of a transfer, reads a flag that was set before there were any.
    """

    def __init__(self, settings: PluginSettings, originals: Mapping[str, Callable[..., Any]]) -> None:
        self.settings = settings
        self.refusals = Refusals(settings.mode, _log)
        self._originals = originals
        self._runner: Any = None
        self._pool: GuardedPool | None = None
        self._is_verified = False
        self._logbook: Logbook | None = None
        self.condemned = Condemned(settings.mode)
        self.has_lost_pages = False  # page 0 stands in what is freed
        self.has_given_pointers = False  # to a transfer, which goes on using them
        self.group: Any = None  # of the ranks that run the same batches
        self.in_pairs: bool | None = None  # whether the cache finds prefixes by pairs of tokens; None before it exists

    @property
    def pool(self) -> GuardedPool:
        """Asked for only where `guards` or `guards_rows` said yes; it outlives a guard that goes off, since a transfer
        goes on to write to its arrays."""
        assert self._pool is not None
        return self._pool

    @property
    def logbook(self) -> Logbook:
        """Of the pool's tracker; asked for where it is."""
        assert self._logbook is not None
        return self._logbook

    @property
    def is_on(self) -> bool:
        """Whether there is a pool that is guarded."""
        return self._pool is not None and not self.refusals.is_off

    def guards(self, allocator: Any) -> bool:
        """Whether these are the slots of the guarded pool; not before it is attached."""
        return self.is_on and self.pool.allocator is allocator

    def guards_rows(self, row_pool: Any) -> bool:
        """The same, of rows. A draft model has pages of its own, but neither slots nor rows."""
        return self.is_on and self.pool.row_pool is row_pool

    def is_sent(self, kv_pool: Any) -> bool:
        """Whether these are the pages that a transfer moves together with the guard's tags."""
        return self.is_on and self._runner.token_to_kv_pool is kv_pool and self._mode() != "null"

    def runs(self, runner: Any) -> bool:
        """Whether this runs the model whose tokens are released, and not its draft."""
        return self.is_on and self._runner is runner

    def attach(self, runner: Any) -> None:
        """To the pools of a model that has just been made. Refuses what is not covered, or not new."""
        if runner.is_draft_worker:
            return
        with self.refusals.refusing():
            if self._runner is not None:
                raise KvGuardError("the guard is attached to a pool already", remedy="serve one model in a process")
            self._runner = runner
            check_installed(self._originals)
            check_options(runner.server_args)  # first what has a name on the command line
            check_model(runner)
            check_class(runner.token_to_kv_pool_allocator, ALLOCATORS, "allocator")
            check_class(runner.req_to_token_pool, ROW_POOLS, "pool of rows")
            check_transfers(runner)
            check_secret(runner, self.settings.secret)
            self._make_pool(runner)
        self.group = importlib.import_module(ROOT + "layers.dp_attention").get_dp_tp_group().cpu_group

    def attach_anew(self, allocator: Any) -> None:
        """A pool was given another size, before the first request."""
        if not self.guards(allocator):
            return
        with self.refusals.refusing():
            if self.has_given_pointers:
                raise KvGuardError("the pool changed under a transfer", remedy="report how the server was started")
            self._make_pool(self._runner)

    def check_tree(self, tree: Any) -> None:
        """Refuses a prefix cache that is not known, or that comes before the pools were seen."""
        self._check_attached()
        if not self.guards(tree.token_to_kv_pool_allocator):
            return
        with self.refusals.refusing():
            check_class(tree, TREES, "prefix cache")
            self.in_pairs = bool(tree.tree_core.is_eagle)

    def verify(self) -> None:
        """Before the first step: is every hook in place? Half a guard raises false alarms, and none is silent.

        Hooks were looked at when the pools were made; a module that was imported since may call past them.
        """
        if self._is_verified:
            return
        self._is_verified = True
        self._check_attached()
        if not self.is_on:
            return
        with self.refusals.refusing():
            check_installed(self._originals)
            if self.in_pairs is None:
                raise KvGuardError("the prefix cache was made unseen", remedy="report how the server was started")

    def _check_attached(self) -> None:
        if self._runner is None:
            self.refusals.refuse(
                KvGuardError("the pools were made unseen", remedy="see in SGLang's log why a hook failed")
            )

    def _make_pool(self, runner: Any) -> None:
        allocator, row_pool = runner.token_to_kv_pool_allocator, runner.req_to_token_pool
        check_unused(allocator, row_pool)
        size = _size(allocator, row_pool.req_to_token)
        self._check_memory(size)
        identity = PoolIdentity(
            model=self.settings.model or fingerprint(runner.model_config.hf_config.to_dict()),
            layout=layout_of(runner.token_to_kv_pool, size.page_size),
        )
        settings = self.settings.of_tracker(identity, size, runner.gpu_id)
        self._pool = GuardedPool(settings, allocator, row_pool, receives=self._mode() == "decode")
        self._logbook = Logbook(self._pool.tracker, self.settings, _log, (runner.gpu_id, 0))
        self.refusals.when_off(self._logbook.detach)

    def _mode(self) -> str:
        return str(self._runner.server_args.disaggregation_mode)

    def _check_memory(self, size: PoolSize) -> None:
        beside = KeptPages.BYTES_A_PAGE + Inbox.BYTES_A_PAGE
        check_memory(
            size.num_bytes + size.num_pages * beside, self.settings, f"{size.num_rows} rows of {size.most_pages} pages"
        )


def _size(allocator: Any, table: Tensor) -> PoolSize:
    """Page 0 takes what padding writes, and row 0 is read by it."""
    page_size = int(allocator.page_size)
    num_rows, num_tokens = table.shape
    return PoolSize(
        num_pages=int(allocator.size) // page_size + 1,
        page_size=page_size,
        num_rows=num_rows,
        most_pages=-(-num_tokens // page_size),
        null_page=0,
    )


def fingerprint(config: Mapping[str, object]) -> str:
    """Of a model's config, without what names its place or the library that wrote it."""
    kept = {key: value for key, value in config.items() if not key.startswith("_") and key != "transformers_version"}
    return hashlib.blake2b(json.dumps(kept, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def layout_of(pool: Any, page_size: int) -> str:
    """What two pools must share before a page of one is read as a page of the other."""
    return f"{type(pool).__name__} of {pool.layer_num} layers in {pool.store_dtype}, pages of {page_size}"
