"""Faults planted into the operators of compiled code, and a battery that must find each."""

from collections.abc import Iterable
from functools import partial

import torch

from tests.faults import hunt
from tests.faults.hunt import Case
from tests.faults.mutant import planted

MUTANTS = planted("COMPILED")
ANSWERS_FOR = ("operators.py", "runtime/")


def battery() -> Iterable[Case]:
    """Cases that fail where something is wrong; most call operators without compiling."""
    from tests import test_operators
    from tests.runtime import test_handles
    from tests.stories import test_compile

    torch.set_num_threads(1)
    for case in test_operators.BY_OPERATORS:
        yield partial(test_operators.test_operators_do_what_functions_do, *case)
    yield test_operators.test_positions_are_what_they_promise
    yield test_operators.test_what_travels_in_messages_is_left_out_of_cuda_graphs
    yield test_handles.test_handles_are_of_one_object_each_and_gone_ones_raise
    yield test_handles.test_layers_of_a_plan_never_meet_another_plan
    yield partial(test_handles.test_numbers_that_no_layer_has_are_refused, -1)
    yield test_handles.test_those_used_last_are_kept
    yield test_operators.test_an_operator_refuses_tensors_that_its_plan_is_not_for
    yield partial(test_compile.test_export_says_that_it_cannot, with_plan=True)


if __name__ == "__main__":
    hunt.main("tests.faults.compiled")
