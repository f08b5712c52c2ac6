"""Each kind of fault that vLLM's plugin claims to see has a test, and each test of a fault is of a kind."""

import re

from quantkit.kv_guard.engines import vllm
from tests.kv_guard.engines import test_vllm_faults as faults

TESTS = {
    "late transfer": [],
    "refilled in a step": [faults.test_a_page_that_is_handed_out_while_its_request_runs],
    "window": [faults.test_a_window_that_is_pruned_too_early, faults.test_a_null_page_within_a_window],
    "stale row": [faults.test_a_row_at_another_requests_intact_page, faults.test_a_fault_that_one_rank_alone_sees],
    "double free": [
        faults.test_a_page_that_is_released_twice,
        faults.test_a_page_that_is_handed_out_while_its_request_runs,
    ],
    "stolen prefix": [faults.test_a_cached_page_that_is_stolen_between_look_up_and_use],
    "freed by retraction": [
        faults.test_a_page_that_is_released_while_its_request_runs,
        faults.test_a_shared_page_that_is_given_up_for_both,
    ],
    "cancelled speculation": [faults.test_a_cached_page_that_is_written],
    "off by one": [faults.test_a_row_that_is_shifted_by_a_page, faults.test_a_hit_on_a_page_of_another_prefix],
    "padding": [faults.test_a_null_page_within_a_window, faults.test_a_token_that_would_be_stored_elsewhere],
    "host page reused": [],
    "torn or bit flip": [
        faults.test_a_tag_that_is_overwritten_during_the_step,
        faults.test_a_cached_page_that_is_overwritten_is_read_once,
    ],
    "fork": [faults.test_a_cached_page_that_is_written],
}
# of what follows a fault, whichever it is
OUTCOMES = {
    faults.test_what_was_computed_from_a_bad_page_is_not_served,
    faults.test_the_new_holder_of_a_page_that_was_written_to_is_not_ended,
}


def test_what_the_plugin_claims_to_see_has_a_test():
    claims = dict(re.findall(r"^    (?:\d+|-) +(\S.*?)  +(\S.*)$", vllm.__doc__, re.M))
    assert claims.keys() == TESTS.keys()
    assert {kind for kind, tests in TESTS.items() if not tests} <= {
        kind for kind, claim in claims.items() if claim.startswith("not seen")
    }


def test_every_test_of_a_fault_is_of_a_kind():
    of_faults = {test for name, test in vars(faults).items() if name.startswith("test_")}
    assert of_faults == OUTCOMES.union(*TESTS.values())
