"""Faults planted into what calls and plans remember, and a battery that must find each."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from tests.faults import hunt
from tests.faults.mutant import planted

MUTANTS = planted("KEPT")
ANSWERS_FOR = (
    "kernels/flash_attn_4.py", "plan/plan_cache.py", "plan/ring_plan.py", "runtime/", "warm_up.py",
)  # fmt: skip


def battery() -> Iterator[Callable[[], object]]:
    """Cases that fail where something is remembered that should not be."""
    from tests import test_warm_up
    from tests.plan import test_plan_cache
    from tests.runtime import test_launches, test_tape

    yield partial(test_warm_up.test_the_first_step_after_it_replays, False)
    for case in ("causal", "masked", "documents"):
        yield partial(test_tape.test_a_tape_does_what_was_recorded, case, "eager")
    for function in (
        test_tape.reads, test_tape.picks, test_tape.from_python, test_tape.alternates
    ):  # fmt: skip
        yield partial(test_tape.test_what_may_be_another_thing_next_time_has_no_tape, function)
    yield test_tape.test_a_kernel_that_does_not_say_so_has_no_tape
    for how in ("together", "own_apart"):
        yield partial(test_tape.few_tokens_have_tapes, how)
    yield partial(test_tape.swaps_have_tapes, 2)
    yield test_tape.test_a_plan_like_another_but_for_numbers_is_recorded_once
    yield test_tape.test_views_of_constants_are_made_once
    yield test_tape.test_a_view_laid_out_otherwise_is_another_tensor
    yield test_tape.test_tensors_laid_out_otherwise_have_a_tape_of_their_own
    yield test_tape.test_what_looks_at_values_may_be_one_operation
    yield test_tape.test_rows_whose_scores_are_nan_are_nan_from_a_tape
    yield test_tape.test_autocast_is_no_matter_of_tapes
    yield deterministic_algorithms
    yield test_plan_cache.test_a_plan_of_the_same_kind_is_found_again
    yield option_of_another_type
    for name in ("key_mask", "alibi_slopes", "dropout"):
        yield partial(test_plan_cache.test_what_depends_on_values_is_made_each_time, name)
    yield settings
    yield launches_of_flash_attn_4
    yield test_launches.test_each_call_gives_its_own_tensors
    yield test_launches.test_tensors_that_begin_alike_are_told_apart
    yield partial(with_patches, test_launches.what_is_held_back_is_compiled_and_not_launched)
    yield partial(with_patches, test_launches.kernels_are_compiled_at_the_same_time)
    yield partial(with_patches, test_launches.what_can_t_be_compiled_may_be_another_time)
    yield partial(with_patches, test_warm_up.one_rank_of_each_host_compiles_first)
    yield partial(with_patches, test_warm_up.what_is_compiled_ahead_is_no_first_call)
    yield partial(with_patches, test_warm_up.what_is_anything_is_no_anomaly)
    yield test_tape.test_one_tensor_given_twice_is_not_two
    yield test_plan_cache.test_who_has_found_another_plan_makes_a_new_one
    yield test_plan_cache.test_plans_of_groups_that_are_gone_go
    yield partial(with_patches, test_plan_cache.few_layers_are_remembered)


def deterministic_algorithms() -> None:
    from tests.runtime import test_tape

    was = torch.are_deterministic_algorithms_enabled()
    try:
        test_tape.deterministic_algorithms_have_tapes_of_their_own()
    finally:
        torch.use_deterministic_algorithms(was)


def with_patches(check: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        check(patch)


def settings() -> None:
    """Plans depend on settings."""
    from tests.plan import test_plan_cache

    with_patches(test_plan_cache.test_settings_are_part_of_the_kind)


def option_of_another_type() -> None:
    """It is refused, though it equals one that was right."""
    from tests.plan import test_plan_cache as plans

    plans.test_an_option_of_another_type_is_refused_though_it_equals_one_that_was_right()


def launches_of_flash_attn_4() -> None:
    """They are operations of tapes."""
    from tests.kernels import test_flash_attn_4

    with pytest.MonkeyPatch.context() as patch:
        test_flash_attn_4.test_tapes_repeat_what_flash_attn_4_launches_and_not_its_python(patch)


if __name__ == "__main__":
    hunt.main("tests.faults.kept")
