"""Faults that would give wrong numbers, or leave ranks waiting, without a word.

Each is one that there was once: strides, scales and sizes of numbers that a kernel does not read
as it is told; what is found again for another mask, layout or count; what ranks keep to themselves.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.faults import hunt
from tests.faults.hunt import Case
from tests.faults.mutant import planted

MUTANTS = planted("SILENT")
ANSWERS_FOR = ("ranks/agreement.py",)


def battery() -> Iterator[Case]:
    """Cases that fail where something is wrong."""
    from tests import test_arguments
    from tests.plan import test_explain
    from tests.project import test_surface
    from tests.ranks import test_agreement, test_ring
    from tests.routing import test_plan as routing
    from tests.runtime import test_digests
    from tests.stories import (
        test_alike,
        test_every_rank_hears,
        test_features,
        test_float16,
        test_gathered_keys,
        test_out_of_step,
    )
    from tests.stories import test_strides as strides

    torch.set_num_threads(1)
    yield partial(strides.test_results_do_not_depend_on_strides, "every other", "gather", "sdpa")
    for scale in (-0.7, 1e-46):
        yield partial(strides.test_any_scale_under_a_causal_mask, torch.float32, scale)
    yield partial(
        test_float16.test_a_bias_of_any_size_is_added, 64, None, -10000.0, "shared", "eager"
    )
    yield test_float16.test_a_bias_that_float16_cannot_bring_is_refused_with_its_bound
    for way in ("gather", "shared memory"):
        yield partial(test_float16.test_parts_may_cancel_that_float16_does_not_hold, way, "eager")
    yield partial(test_float16.test_parts_may_cancel_that_float16_does_not_hold, "ring", "sdpa")
    yield a_wide_sum_is_wide
    yield what_is_compiled_fits
    yield test_gathered_keys.batches_may_be_empty
    yield machines
    yield routing.layers_that_route_other_numbers_share_a_plan
    yield from found_again()
    yield test_features.queries_of_two_sequences_stand_where_their_layout_has_them
    yield test_explain.ranks_without_work_explain_themselves
    yield test_every_rank_hears.test_ranks_in_different_calls_are_all_told_which
    yield test_agreement.test_problems_that_all_ranks_have_are_told_once_and_others_with_their_ranks
    yield test_agreement.test_notes_are_of_any_length
    yield test_agreement.test_what_differs_late_differs
    yield partial(
        test_agreement.test_notes_that_are_none_are_an_error_that_names_the_rank, "other kinds"
    )
    yield test_agreement.test_a_wrong_type_within_a_call_is_not_taken_for_one_of_its_own
    yield test_agreement.test_whatever_breaks_in_a_check_is_told_with_its_kind
    yield a_wrong_type_is_told
    yield test_arguments.test_a_bool_is_no_number
    yield test_arguments.test_a_generator_is_no_checked_function
    yield test_agreement.test_arguments_are_told_by_name_whatever_they_are
    yield test_surface.test_a_bias_is_finite
    walked = "ulysses_attn", "RingAttention", "CoordinateDescentRouter", "spawn", "ring_pass"
    for name in walked:
        yield partial(test_surface.all_wrong_is_refused, name)
    yield test_ring.test_steps_that_differ_have_other_tags
    yield test_out_of_step.test_a_skipped_plan_is_an_error_at_once_and_then_all_go_on
    for how in ("gather", "ulysses"):
        yield partial(
            test_alike.test_one_layer_on_one_rank_and_another_on_the_next_is_an_error, how
        )
    yield partial(
        test_alike.test_sinks_beside_a_plan_without_them_and_the_reverse_are_an_error, True
    )
    for what in test_digests.PREDICATES:
        yield partial(test_digests.test_functions_are_told_apart_by_all_that_they_read, what)
    yield test_digests.test_a_table_that_was_changed_in_place_is_another
    yield partial(test_every_rank_hears.test_all_ranks_hear_of_tensors_without_values, "documents")
    yield partial(test_every_rank_hears.test_all_ranks_hear_of_tensors_without_values, "cu_seqlens")


def machines() -> None:
    """By which plans are chosen."""
    from tests.plan import test_proposal

    with pytest.MonkeyPatch.context() as patch:
        test_proposal.plans_go_by_the_slowest_device_and_by_who_shares_a_host(patch)


def a_wrong_type_is_told() -> None:
    """By whoever is told what is wrong, and then raised."""
    from ring_attention_pytorch.ranks.agreement import typed

    told = []

    @typed(lambda given, problem: told.append((given, problem)))
    def twice(x: int) -> int:
        return 2 * x

    with pytest.raises(ValueError, match="violates type hint"):
        twice("two")
    ((given, problem),) = told
    assert given == {"x": "two"}
    assert str(problem).startswith("twice() parameter x='two'")


def a_wide_sum_is_wide() -> None:
    """Parts in a narrower dtype are summed wide, in own memory and in memory that is given."""
    from ring_attention_pytorch.runtime.accumulate import GradAccumulator

    part = torch.full((1, 3, 2, 4), 6e4).half()
    for place in (None, torch.empty(1, 3, 2, 4)):
        total = GradAccumulator(part, calls=1, place=place, dtype=torch.float32)
        room = total.alloc(slice(0, 3))
        assert room.dtype == torch.float16
        total.add(slice(0, 3), part.clone())
        found = total.finalize()
        assert found.dtype == torch.float32
        assert place is None or found.data_ptr() == place.data_ptr()
        assert torch.equal(found, part.float())


def what_is_compiled_fits() -> None:
    """Fit of what is compiled: the stand-in of cuDNN's op keeps what the op keeps."""
    from tests.support.kernel_cases import STRIDED, faults
    from tests.support.stand_ins import STAND_INS

    with pytest.MonkeyPatch.context() as patch:
        STAND_INS["sdpa-cudnn"](patch)
        for case in STRIDED:
            assert not faults(replace(case, dtype=torch.float64), "sdpa-cudnn", "cpu"), case


def found_again() -> Iterator[Case]:
    """Cached values are found again by all that they depend on."""
    from tests.kernels import test_flex
    from tests.support.flex_on_cpu import stood_in

    def of_masks() -> None:
        with stood_in():
            test_flex.masks_of_plans_are_their_own()
            test_flex.masks_of_owners_are_their_own()

    yield of_masks


if __name__ == "__main__":
    hunt.main("tests.faults.silent")
