"""What the plugin says that it sees, each with the tests of it."""

from quantkit.kv_guard.engines import sglang
from tests.kv_guard.engines import test_sglang_faults as faults
from tests.kv_guard.engines import test_sglang_given_up as given_up
from tests.kv_guard.engines import test_sglang_retraction as retraction
from tests.kv_guard.engines import test_sglang_shared as shared
from tests.kv_guard.engines import test_sglang_start as start
from tests.kv_guard.engines import test_sglang_transfers as transfers

TESTS = {
    "late transfer (1)": [
        given_up.test_a_server_that_says_nothing,
        given_up.test_content_that_lands_behind_the_release_though_its_tag_had_landed,
        transfers.test_a_late_write_to_pages_that_were_granted_anew,
    ],
    "another's pages land, or none (1, 13)": [
        transfers.test_anothers_pages_land,
        transfers.test_pages_that_land_elsewhere,
        transfers.test_a_transfer_that_has_not_landed,
    ],
    "step ahead of its transfer (13)": [given_up.test_a_step_reads_what_has_not_come],
    "page refilled in a step (2)": [
        transfers.test_a_late_write_to_pages_that_were_granted_anew,
        given_up.test_what_lands_while_the_last_step_of_a_request_that_has_ended_runs,
    ],
    "window (3)": [start.test_windows_are_refused_by_their_option],
    "stale or mixed row (4)": [
        faults.test_a_row_that_names_anothers_page,
        faults.test_an_old_tail_in_a_row,
        faults.test_a_row_of_nobody_ends_the_whole_batch,
    ],
    "double free (6)": [faults.test_a_page_that_is_freed_twice, faults.test_a_page_of_two_owners],
    "stolen prefix (7)": [shared.test_a_cached_page_that_is_stolen],
    "freed by retraction, or in chunks (8)": [shared.test_pages_of_a_prompt_in_chunks_that_are_freed_while_it_runs],
    "retracted with another's page (8)": [
        retraction.test_anothers_page_that_goes_to_the_host,
        retraction.test_a_late_write_to_a_page_that_goes_to_the_host,
    ],
    "cancelled speculation (9)": [shared.test_a_cancelled_speculation_that_frees_a_shared_prefix],
    "off by one (10)": [faults.test_a_row_that_is_shifted_by_a_page],
    "padding, or a token beside its place (11)": [
        faults.test_a_row_that_writes_to_anothers_page,
        faults.test_a_token_beside_its_place,
    ],
    "torn tag (13)": [faults.test_a_tag_that_lands_while_a_step_runs],
    "torn or flipped content (13)": [],
    "host page reused (14)": [start.test_options_that_are_not_covered],
    "fork": [start.test_beams_are_refused_alone],
}


def table():
    """What is claimed, by fault."""
    text = sglang.__doc__.split("| fault | seen |")[1].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]
    return dict(rows)


def test_what_is_claimed_is_tested():
    claimed = table()
    assert claimed.keys() == TESTS.keys()
    assert [name for name, tests in TESTS.items() if not tests] == [
        name for name, seen in claimed.items() if seen.startswith("not: nothing")
    ]
