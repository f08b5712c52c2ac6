"""A miniature of SGLang 0.5.23: what the guard's hooks touch, under the same names and parameters.

It is checked against the wheel where that is at hand (test_sglang_wheel.py), which runs the same scenarios on the
wheel's own allocators, prefix caches and result processing.
"""

from tests.kv_guard.engines.small_sglang import allocation, places, registry, requests, running, slots, transfers, tree

__all__ = ["allocation", "places", "registry", "requests", "running", "slots", "transfers", "tree"]
