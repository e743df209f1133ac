"""Faults planted into what calls and plans remember, and a battery that must find each."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests import hunt
from tests.faults import Mutant

MUTANTS = [
    Mutant(
        "a tape of what differs each time", "runtime/tape.py:Tapes.run",
        "recorder.replay() if recorder.agrees(known) else None", "recorder.replay()",
    ),
    Mutant(
        "constants of a tape come and go", "runtime/tape.py:_Recorder.agrees",
        "number in self.views or _same(a, b)", "True",
    ),
    Mutant(
        "tensors laid out otherwise take the same tape", "runtime/tape.py:Tapes.run",
        "(t.stride(), t.data_ptr() & 15)", "True",
    ),
    Mutant(
        "what reads values is taped", "runtime/tape.py:_Recorder.__torch_function__",
        "self.refused = True", "pass",
    ),
    Mutant(
        "a tape runs under autocast", "runtime/tape.py:_without_autocast",
        "if not torch._C._is_any_autocast_enabled():", "if True:",
    ),
    Mutant(
        "views of what is given are made once", "runtime/tape.py:_Recorder._is_constant_view",
        'if not self._names[id(t)].startswith("c"):', "if False:",
    ),
    Mutant(
        "a view laid out otherwise is the tensor itself", "runtime/tape.py:_is_as_given",
        "and out.stride() == t.stride()", "",
    ),
    Mutant(
        "a tape's operations are taped within another", "runtime/tape.py:opaque",
        "with torch._C.DisableTorchFunction():", "with contextlib.nullcontext():",
    ),
    Mutant(
        "a plan that one rank has found is taken", "plan/ring_plan.py:RingPlan.make",
        'all(rank["plan"] == kept.plan.number for rank in lengths)', "True",
    ),
    Mutant(
        "options of other types are found again", "plan/kept.py:kind_of",
        "tuple(map(type, values))", "()",
    ),
    Mutant(
        "seeds that are drawn are found again", "plan/kept.py:kind_of",
        'options.get("dropout") or options.get("mask_mod") is not None', "False",
    ),
    Mutant(
        "options that are tensors are found again by their identity", "plan/kept.py:kind_of",
        "any(isinstance(value, Tensor) for value in values)", "False",
    ),
    Mutant(
        "plans are found again whatever the settings", "plan/kept.py:_globals",
        "torch.is_grad_enabled(),", "",
    ),
    Mutant(
        "plans of groups that are gone stay", "plan/kept.py:keep",
        "if not ring.exists:", "if False:",
    ),
]  # fmt: skip


def battery() -> Iterator[Callable[[], object]]:
    """Cases that fail where something is remembered that should not be."""
    from tests import test_kept, test_tape

    for case in ("causal", "masked", "documents"):
        yield partial(test_tape.test_a_tape_does_what_was_recorded, case, "eager")
    for function in (
        test_tape.reads, test_tape.picks, test_tape.from_python, test_tape.alternates
    ):  # fmt: skip
        yield partial(test_tape.test_what_may_be_another_thing_next_time_has_no_tape, function)
    yield test_tape.test_views_of_constants_are_made_once
    yield test_tape.test_a_view_laid_out_otherwise_is_another_tensor
    yield test_tape.test_tensors_laid_out_otherwise_have_a_tape_of_their_own
    yield test_tape.test_what_looks_at_values_may_be_one_operation
    yield test_tape.test_rows_whose_scores_are_nan_are_nan_from_a_tape
    yield test_tape.test_autocast_is_no_matter_of_tapes
    yield test_kept.test_a_plan_of_the_same_kind_is_found_again
    yield test_kept.test_an_option_of_another_type_is_refused_though_it_equals_one_that_was_right
    for name in ("key_mask", "alibi_slopes", "dropout"):
        yield partial(test_kept.test_what_depends_on_values_is_made_each_time, name)
    yield settings
    yield test_kept.test_who_has_found_another_plan_makes_a_new_one
    yield test_kept.test_plans_of_groups_that_are_gone_go


def settings() -> None:
    """Plans depend on settings."""
    from tests import test_kept

    with pytest.MonkeyPatch.context() as patch:
        test_kept.test_settings_are_part_of_the_kind(patch)


if __name__ == "__main__":
    hunt.main("tests.kept_mutants")
