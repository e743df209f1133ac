"""Faults planted into what becomes of a ring that fails, and a battery that must find each."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from tests.faults import hunt
from tests.faults.mutant import planted

MUTANTS = planted("FAILING")
ANSWERS_FOR = ("plan/ring_plan.py", "ranks/")


def battery() -> Iterator[Callable[[], object]]:
    """Cases that fail where something is wrong."""
    from tests.ranks import test_agreement as agreement
    from tests.ranks import test_failure_reports, test_failures
    from tests.ranks import test_guard as guard
    from tests.ranks import test_notes as links
    from tests.stories import test_failing_ranks

    torch.set_num_threads(1)
    yield test_failures.test_a_wait_in_vain_is_told_in_words_and_not_in_the_transport_s
    yield test_failures.test_an_error_names_its_step_and_survives_a_pipe
    yield test_failures.test_what_is_under_way_when_a_call_fails_lives_on
    yield test_failures.test_peers_are_told_of_what_fails_in_a_call_and_of_nothing_else
    yield test_failures.test_a_group_of_the_process_that_this_one_was_forked_from_is_refused
    yield test_failing_ranks.test_what_ranks_disagree_about_breaks_nothing
    yield test_failing_ranks.test_a_broken_ring_says_so_until_the_next_plan
    yield guard.test_the_next_call_says_what_a_device_found
    yield guard.test_a_plan_says_on_all_ranks_what_one_device_found_and_mends_the_ring
    yield guard.test_what_a_call_has_said_a_plan_does_not_say_again
    yield guard.test_devices_tell_of_a_failure_in_a_call_and_elsewhere_in_fail_together
    yield guard.test_a_device_that_fails_hides_no_error
    yield partial(
        test_failing_ranks.test_notes_in_each_call_tell_all_ranks_at_once_who_is_where,
        "skips_backward", "gather",
    )  # fmt: skip
    yield test_failure_reports.test_words_of_a_failure_are_those_since_notes_were_last_compared
    yield test_failures.test_after_a_wait_in_vain_nothing_is_agreed_over_that_group_and_others_hear_of_it  # noqa: E501
    yield test_failures.test_a_ring_that_no_plan_mends_does_not_say_so
    yield test_failures.test_a_wait_is_told_again_when_it_has_doubled_and_no_more_when_it_is_over
    yield links.test_patience_is_with_the_exchange_and_not_with_each_message
    yield partial(links.test_a_packet_that_is_no_note_names_who_has_sent_it, b"?")
    yield links.test_only_ranks_that_are_awaited_are_let_in
    for kind in ("endless", "of devices", "other numbers"):
        yield partial(
            agreement.test_a_malformed_note_is_refused_by_all_with_the_rank_that_sent_it, kind
        )
    yield links.test_who_does_not_come_in_time_is_named_and_finds_all_closed
    yield links.test_an_end_is_noticed_while_another_rank_is_waited_for
    yield links.test_what_an_interrupted_exchange_has_left_is_not_taken_for_the_next_one
    yield links.test_a_failure_closes_links_in_fail_together_only
    yield links.test_the_error_names_who_is_missing_and_nobody_else
    yield links.test_a_forked_child_keeps_no_link_open
    yield partial(links.test_if_one_rank_has_no_way_none_has, "another host")


if __name__ == "__main__":
    hunt.main("tests.faults.failing")
