"""Faults planted into what becomes of a ring that fails, and a battery that must find each."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from tests import hunt
from tests.faults import Mutant

MUTANTS = [
    Mutant(
        "a ring stays whole whatever fails", "comm/steps.py:Steps._break",
        "if self.broken is not None:", "if True:",
    ),
    Mutant(
        "a broken ring goes on", "comm/steps.py:Steps._go_on",
        "if self.broken is not None:", "if False:",
    ),
    Mutant(
        "a broken ring is never mended", "comm/steps.py:Steps.mend",
        "self.broken = None", "pass",
    ),
    Mutant(
        "what is under way is let go", "comm/steps.py:Steps._break",
        "self._left, self.under_way = self.under_way, []", "self.under_way = []",
    ),
    Mutant(
        "what ranks disagree about breaks their ring", "comm/steps.py:Steps.call",
        "except Disagreement:", "except ZeroDivisionError:",
    ),
    Mutant("peers are told nothing", "comm/steps.py:Steps.call", "tell_peers()", "pass"),
    Mutant(
        "what devices find is told to nobody", "comm/steps.py:Steps._go_on",
        "if self.guards and", "if False and",
    ),
    Mutant(
        "what devices have found is never forgotten", "comm/steps.py:Steps.mend",
        "guard.reset()", "pass",
    ),
    Mutant(
        "devices forget while others wait", "comm/steps.py:Steps.mend", "guard.wait()", "pass",
    ),
    Mutant(
        "a plan keeps what a device found to itself", "comm/ring.py:Ring.gather_notes",
        "if told not in", "if False and told not in",
    ),
    Mutant(
        "one rank's device forgets alone", "comm/ring.py:Ring.gather_notes",
        "if any(troubles)", "if trouble",
    ),
    Mutant(
        "devices tell nobody of a failure", "comm/failures.py:tell_peers", "guard.fail()", "pass",
    ),
    Mutant(
        "devices tell nobody of a call's", "comm/steps.py:Steps._break", "guard.fail()", "pass",
    ),
    Mutant(
        "a device's error hides others", "comm/steps.py:Steps._break",
        "with suppress(RuntimeError):", "if True:",
    ),
    Mutant(
        "nobody compares notes in calls", "plan/ring_plan.py:RingPlan.call",
        "self.always", "False",
    ),
    Mutant(
        "any call is the same", "comm/agreement.py:in_the_same_call",
        'f"{ring.steps.now}\\n{call_site()}"', 'f"a call\\n{call_site()}"',
    ),
    Mutant(
        "errors name no rank", "comm/failures.py:RingError.waiting",
        "ranks = sorted({*ranks})", "ranks = []",
    ),
    Mutant(
        "groups of another process are used", "comm/failures.py:known",
        "group in inherited or _world() in inherited", "False",
    ),
]  # fmt: skip


def battery() -> Iterator[Callable[[], object]]:
    """Cases that fail where something is wrong."""
    from tests import test_failures as failures
    from tests import test_guard as guard
    from tests import threads

    torch.set_num_threads(1)
    threads.PATIENCE = 10.0
    yield failures.test_an_error_names_its_step_and_survives_a_pipe
    yield failures.test_what_is_under_way_when_a_call_fails_lives_on
    yield failures.test_peers_are_told_of_what_fails_in_a_call_and_of_nothing_else
    yield failures.test_a_group_of_the_process_that_this_one_was_forked_from_is_refused
    yield failures.test_what_ranks_disagree_about_breaks_nothing
    yield failures.test_a_broken_ring_says_so_until_the_next_plan
    yield guard.test_the_next_call_says_what_a_device_found
    yield guard.test_a_plan_says_on_all_ranks_what_one_device_found_and_mends_the_ring
    yield guard.test_what_a_call_has_said_a_plan_does_not_say_again
    yield guard.test_devices_tell_of_a_failure_in_a_call_and_elsewhere_in_fail_together
    yield guard.test_a_device_that_fails_hides_no_error
    yield partial(
        failures.test_notes_in_each_call_tell_all_ranks_at_once_who_is_where,
        "skips_backward", "gather",
    )  # fmt: skip


if __name__ == "__main__":
    hunt.main("tests.failure_mutants")
