"""Faults that would give wrong numbers, or leave ranks waiting, without a word.

Each is one that there was once: strides, scales and sizes of numbers that a kernel does not read
as it is told; what is found again for another mask, layout or count; what ranks keep to themselves.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests import hunt
from tests.faults import Mutant
from tests.hunt import Case

MUTANTS = [
    # how tensors lie, and how large numbers are
    Mutant(
        "strides are taken to be 1", "kernels/sdpa.py:_dense",
        "t if t.stride(-1) == 1 else t.contiguous()", "t",
    ),
    Mutant(
        "hidden scores times a scale below 0", "kernels/sdpa.py:CAN",
        '{"softclamp", "unusual_scale",', '{"softclamp",',
    ),
    Mutant(
        "a scale that float32 takes for 0", "runtime/interfaces.py:KernelRequest.of",
        "scale < torch.finfo(torch.float32).tiny", "0 >= scale",
    ),
    Mutant(
        "a bias over its scale is larger than its dtype holds", "runtime/scores.py:_undoing",
        "2.0 ** min(1023, 1 - math.frexp(scale)[1])", "1.0",
    ),
    Mutant(
        "scales that float16 can't undo", "runtime/scores.py:bias_problem",
        "if not held.tiny <= _undoing(scale) <= held.max:", "if False:",
    ),
    Mutant(
        "parts of float16 travel as they are", "runtime/rowwise.py:wire_dtype",
        "torch.float32 if dtype == torch.float16 else dtype", "dtype",
    ),
    Mutant(
        "the CPU's kernel makes parts in float16", "kernels/sdpa.py:backward",
        "if q.dtype == torch.float16 or saved.dlse is not None:", "if saved.dlse is not None:",
    ),
    Mutant(
        "a part is taken for the sum in another dtype",
        "runtime/accumulate.py:GradAccumulator.finalize",
        "self._parts[0][1][0].dtype == self._end", "True",
    ),
    Mutant(
        "kernels get memory of the sum's dtype", "runtime/accumulate.py:_Accumulator._alloc",
        "if self._end != self._like.dtype:", "if False:",
    ),
    Mutant(
        "what was compiled for other strides", "kernels/sdpa_cudnn.py:_as_told_by",
        "if t.stride() == strides:", "if True:",
    ),
    Mutant(
        "batches of nothing are copied", "comm/gather_first.py:_Call._come",
        "if len(self.own.k):",
        "if True:",
    ),
    # what is found again
    Mutant(
        "routed layers share plans by what one rank has",
        "routing/attention.py:HeavyAttention.attend",
        "causal, counts, q.shape[2:], k.shape[2:],", "causal, q.shape, k.shape,",
    ),
    Mutant(
        "another mask's cells", "runtime/interfaces.py:Tiles.of_another_mask",
        "found.masked = {}", "pass",
    ),
    Mutant(
        "cells of another owner's mask", "plan/ring_plan.py:RingPlan.tiles",
        "if self.repeats or keys not in self._of_mask:", "if keys not in self._of_mask:",
    ),
    Mutant(
        "cells of a mask that all plans share", "kernels/flex.py:_calls", "of_mask=True",
        "of_mask=False",
    ),
    Mutant(
        "another layout's graphs", "runtime/graphs.py:GraphCache.of",
        "(repr(swap.queries), repr(swap.keys))",
        "(swap.queries.lengths, swap.keys.lengths)",
    ),
    Mutant(
        "queries of two sequences in the order of ranks", "plan/prepare.py:place_tokens",
        "dropped or options.alibi_slopes is not None or options.mask_mod is not None", "dropped",
    ),
    # what ranks tell one another
    Mutant(
        "a rank without work divides by it", "plan/explain.py:_prediction", "if seconds:",
        "if True:",
    ),
    Mutant(
        "any call's notes will do", "comm/notes.py:check_subjects",
        "if len({*first_lines}) == 1 and first_lines[0] is not None:", "if True:",
    ),
    Mutant(
        "notes end where they are exchanged", "comm/notes.py:exchange",
        "if more > 0", "if False",
    ),
    Mutant(
        "notes of any kind are read", "comm/agreement.py:_read",
        "not isinstance(note.get(name, ...), kind)", "False",
    ),
    Mutant(
        "messages of any plan", "comm/steps.py:Steps._begin", "(self._since, call, about)",
        "(self._since, call)",
    ),
    Mutant("messages of any call", "comm/steps.py:Steps.call", "self.calls + 1", "self.calls"),
    Mutant(
        "ranks out of step go on", "comm/agreement.py:_check_in_step",
        "if len({*steps}) > 1:", "if False:",
    ),
    Mutant(
        "what differs late is taken for the same", "comm/agreement.py:_plain",
        "if len(text) <= _LONGEST: return text", "return text[:_LONGEST]",
    ),
    Mutant(
        "a wrong type is kept to itself", "comm/agreement.py:typed",
        "tell(given, problem)", "tell, signature",
    ),
    Mutant(
        "a wrong type within a call is told as its own", "comm/agreement.py:_of_this_call",
        "trace.tb_next.tb_next is None", "True",
    ),
    Mutant(
        "what breaks is kept to itself", "comm/agreement.py:problem_of",
        "except Exception as error:",
        "except OSError as error:",
    ),
    Mutant(
        "documents without values", "geometry/documents.py:documents_problem",
        "if fits and not documents.is_meta:", "if fits:",
    ),
]  # fmt: skip


def battery() -> Iterator[Case]:
    """Cases that fail where something is wrong."""
    from tests import test_agreement as notes
    from tests import test_cost, test_features, test_float16, test_routing, test_transports, threads
    from tests import test_steps as steps
    from tests import test_strides as strides

    torch.set_num_threads(1)
    threads.PATIENCE = 10.0
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
    yield test_transports.batches_may_be_empty
    yield test_routing.layers_that_route_other_numbers_share_a_plan
    yield from found_again()
    yield test_features.queries_of_two_sequences_stand_where_their_layout_has_them
    yield test_cost.ranks_without_work_explain_themselves
    yield notes.test_ranks_in_different_calls_are_all_told_which
    yield notes.test_notes_are_of_any_length
    yield notes.test_what_differs_late_differs
    yield partial(notes.test_notes_that_are_none_are_an_error_that_names_the_rank, "other kinds")
    yield notes.test_a_wrong_type_within_a_call_is_not_taken_for_one_of_its_own
    yield a_wrong_type_is_told
    yield steps.test_steps_that_differ_have_other_tags
    yield steps.test_a_skipped_plan_is_an_error_at_once_and_then_all_go_on
    yield partial(notes.test_all_ranks_hear_of_tensors_without_values, "documents")
    yield partial(notes.test_all_ranks_hear_of_tensors_without_values, "cu_seqlens")


def a_wrong_type_is_told() -> None:
    """By whoever is told what is wrong, and then raised."""
    from ring_attention_pytorch.comm.agreement import typed

    told = []

    @typed(lambda given, problem: told.append((given, problem)))
    def twice(x: int) -> int:
        return 2 * x

    with pytest.raises(ValueError, match="violates type hint"):
        twice("two")
    ((given, problem),) = told
    assert given == {"x": "two"}
    assert problem.startswith("twice() parameter x='two'")


def a_wide_sum_is_wide() -> None:
    """Of parts in a narrower dtype: in memory of its own, and in memory that is given."""
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
    """Of cuDNN's op, whose stand-in keeps what the op keeps."""
    from tests.kernel_cases import STRIDED, faults
    from tests.test_adapters import STAND_INS

    with pytest.MonkeyPatch.context() as patch:
        STAND_INS["sdpa-cudnn"](patch)
        for case in STRIDED:
            assert not faults(replace(case, dtype=torch.float64), "sdpa-cudnn", "cpu"), case


def found_again() -> Iterator[Case]:
    """What is kept for another time, by all that tells it apart."""
    from tests import test_flex, test_graphs
    from tests.flex_on_cpu import stood_in

    def of_masks() -> None:
        with stood_in():
            test_flex.masks_of_plans_are_their_own()
            test_flex.masks_of_owners_are_their_own()

    def of_layouts() -> None:
        with pytest.MonkeyPatch.context() as patch:
            test_graphs.layouts_make_another_kind(patch)

    yield of_masks
    yield of_layouts


if __name__ == "__main__":
    hunt.main("tests.silent_mutants")
