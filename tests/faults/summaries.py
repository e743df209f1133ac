"""Faults planted into attention to summaries, and a battery that must find each."""

from collections.abc import Callable, Iterable

from tests.faults import hunt
from tests.faults.mutant import planted

MUTANTS = planted("SUMMARIES")
ANSWERS_FOR = ("runtime/", "summaries/")


def battery() -> Iterable[Callable[[], None]]:
    """Cases that fail where something is wrong."""
    from dataclasses import replace

    import torch

    from tests.runtime import test_rowwise
    from tests.summaries import test_module as module
    from tests.summaries import test_plan as plan
    from tests.summaries import test_pooling as pooling
    from tests.support.summary_cases import CASES, PACKED, Case, check_in_threads

    torch.set_num_threads(1)
    yield lambda: test_rowwise.test_merged_parts_are_dense_attention_and_so_are_gradients((0, 4, 9))
    yield lambda: test_rowwise.test_parts_of_any_dtype_are_merged_in_wide_numbers(torch.bfloat16)
    yield lambda: check_in_threads(Case(), 2)
    yield pooling.test_what_the_plan_was_not_made_for_is_not_summarised
    yield lambda: check_in_threads(replace(PACKED, layout="striped"), 3)
    for name, case in CASES.items():
        layout = plan.LAYOUTS[len(name) % 3]
        yield lambda case=case, layout=layout: check_in_threads(replace(case, layout=layout), 2)
    yield lambda: plan.test_how_long_the_far_part_takes_is_told_by_its_documents("bounded")
    for restart in (False, True):
        yield lambda restart=restart: module.test_a_layer_is_the_reference_of_its_projections(
            restart
        )
    yield lambda: decoding(14, 4)
    yield lambda: decoding(None, 30)


def decoding(distance: int | None, prompt: int) -> None:
    from tests.support.summary_cases import decoded

    found = decoded("contiguous", distance, False, "mean", prompt)
    assert max(found["prompt"], found["later"]) < 1e-6


if __name__ == "__main__":
    hunt.main("tests.faults.summaries")
