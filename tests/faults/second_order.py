"""Faults planted into second derivatives and tangents, and a battery that must find each."""

from collections.abc import Callable, Iterable

from tests.faults import hunt
from tests.faults.mutant import planted

MUTANTS = planted("SECOND_ORDER")
ANSWERS_FOR = (
    "attention.py", "kernels/", "runtime/interfaces.py", "runtime/torch_func.py", "second_order.py",
)  # fmt: skip


def battery() -> Iterable[Callable[[], None]]:
    """Cases that fail where something is wrong."""
    import torch

    from tests import test_second_order as cases

    torch.set_num_threads(1)
    yield bent_scores_hold
    yield heads_for_sequence_hold
    yield lambda: cases.test_ranks_that_differ_in_tangents_all_say_so(by_module=False)
    yield cases.test_a_penalty_on_what_whole_sequences_are_made_into
    yield lambda: cases.test_every_kernel_has_second_derivatives("sdpa")


def bent_scores_hold() -> None:
    """Tangents, and gradients of gradients, of what bends scores and of what moves lse."""
    from tests.support.features import together
    from tests.support.second_order import Second

    bent = Second(together(("causal", "softclamp", "sinks", "d_v != d")))
    errors = bent.errors(2, "zigzag")
    assert max(errors.values()) < 1e-12, errors


def heads_for_sequence_hold() -> None:
    from tests.support.features import FEATURES
    from tests.support.second_order import Second

    errors = Second(FEATURES["one key head"]).errors(2, "striped", ulysses=2)
    assert max(errors.values()) < 1e-12, errors


if __name__ == "__main__":
    hunt.main("tests.faults.second_order")
