"""What vLLM loads: the entry point of the group `vllm.general_plugins`."""

import logging
import os
from collections.abc import Callable
from importlib import import_module

from quantkit.kv_guard.engines.refusals import Refusals
from quantkit.kv_guard.engines.settings import PluginSettings, read_settings
from quantkit.kv_guard.engines.targets import check_targets, check_version
from quantkit.kv_guard.engines.vllm import targets
from quantkit.kv_guard.engines.vllm.wrapping import wrap
from quantkit.kv_guard.tracker import Mode

_LOG = logging.getLogger("vllm.quantkit_kv_guard")


def register() -> None:
    """The entry point; any number of times in a process, and inherited by processes that are forked from it."""
    settings = read_settings(os.environ)
    if settings.mode is not Mode.OFF:
        with Refusals(settings.mode, _LOG).refusing():
            _hang_doors(settings)


def _hang_doors(settings: PluginSettings) -> None:
    check_version(import_module("vllm").__version__, targets.SUPPORTED)
    check_targets(targets.DOORS, targets.SUPPORTED)
    # vLLM goes on without a plugin that cannot be imported: what may fail is imported here, where an error ends it
    hooks = import_module("quantkit.kv_guard.engines.vllm.hooks")
    for door, hook in (
        (targets.GET_SCHEDULER, hooks.hook_scheduler),
        (targets.INIT_DEVICE, hooks.hook_worker),
    ):
        wrap(door.name, hooks.before(lambda hook=hook: _go_through(hook, settings)))


def _go_through(hook: Callable[[PluginSettings], None], settings: PluginSettings) -> None:
    with Refusals(settings.mode, _LOG).refusing():
        hook(settings)
