"""Faults between a training loop and attention, and a battery that must find each."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.faults import hunt
from tests.faults.mutant import planted

MUTANTS = planted("TRAINING")
ANSWERS_FOR = ("nn/", "plan/", "training/")


def battery() -> Iterator[Callable[[], object]]:
    """Steps over rings of threads against one process, and mistakes that must raise."""
    from tests.nn import test_averaging as averaging
    from tests.nn import test_projections as projections
    from tests.training import test_batches as batches
    from tests.training import test_comparison as comparison
    from tests.training import test_dataset
    from tests.training import test_losses as losses

    torch.set_num_threads(1)
    for kind in ("plain", "padded left", "padded right", "borders", "restarting positions"):
        yield partial(step_is_right, kind, "logits")
    yield partial(step_is_right, "weights", "head")
    yield loss_of_nothing
    yield rolls
    yield logprobs_are_right
    yield from losses_are_right()
    yield losses.test_ranks_in_blocks_of_different_batches_are_told_by_the_loss
    for use in comparison.WAYS:
        look = comparison.test_another_batch_is_noticed_in_the_block_or_in_the_next_agreement
        yield partial(look, use)
    yield comparison.test_a_digest_is_unread_only_if_the_host_has_no_other_reason_to_wait
    for ulysses in (1, 2):
        yield partial(batches.test_a_plan_is_for_batches_of_an_equal_mask_only, ulysses)
    yield batches.test_a_plan_whose_mask_was_given_is_for_batches_of_equal_values
    yield batches.test_a_plan_of_other_ranks_than_the_batch_is_an_error
    yield files_differ
    yield test_dataset.test_documents_are_packed_without_a_gap_and_predict_nothing_beyond_them
    yield goes_on
    yield partial(
        test_dataset.test_an_iterator_goes_on_where_the_last_one_stopped, "documents", 1, Path()
    )
    yield test_dataset.test_what_fails_to_be_made_is_not_skipped
    yield test_dataset.test_documents_of_an_iterator_are_not_taken_twice
    for lives_on in (False, True):
        behind = test_dataset.test_behind_a_worker_the_state_comes_with_the_batch
        yield partial(behind, "documents", lives_on, Path())
    yield projections.test_weights_in_three_are_those_in_one_in_their_order
    yield projections.test_heads_that_do_not_divide_are_refused
    yield projections.test_projections_that_were_not_split_are_an_error
    for over, apart, wrong in (([0, 2], (), True), ([0, 2], (0, 2), False)):
        look = averaging.test_sharding_over_too_few_ranks_is_told_after_backward
        yield partial(look, over, apart, wrong)
    yield all_hear_of_a_wrong_type
    yield recomputed
    for mistake in (whole_sequences, backward_outside, backward_elsewhere, a_plan_of_another):
        yield partial(raises, mistake)


def step_is_right(kind: str, how: str) -> None:
    from tests.support import threads, training
    from tests.training.test_batches import EXACT, errors

    want = training.one_process(kind)
    found, _ = threads.run(2, lambda ring: training.spread(kind, how, group=ring))
    assert max(errors(got, want) for got in found) < EXACT


def loss_of_nothing() -> None:
    """It has a graph, so that a rank without tokens takes part in backward."""
    from ring_attention_pytorch import ring_cross_entropy

    x = torch.zeros(1, 0, 4, requires_grad=True)
    assert ring_cross_entropy(x, torch.zeros(1, 0, dtype=torch.long)).requires_grad


def rolls() -> None:
    from tests.support import threads
    from tests.training.test_batches import rolled

    assert all(threads.run(2, rolled)[0])


def logprobs_are_right() -> None:
    from tests.support import threads
    from tests.training.test_batches import EXACT, logprobs

    assert max(threads.run(2, lambda ring: logprobs("head", ring))[0]) < EXACT


def losses_are_right() -> Iterator[Callable[[], object]]:
    """With weights and a head's terms over two ranks, and what is wrong with them."""
    from tests.support import threads
    from tests.training import test_losses as losses

    def mean_is_right(case: tuple) -> None:
        for found in threads.run(2, lambda ring: losses.mean_errors(*case, ring))[0]:
            assert max(found.values()) < losses.EXACT

    def refused(change: str) -> None:
        for told in threads.run(2, lambda ring: losses.refusal(change, ring))[0]:
            assert re.search(change, told)

    for case in losses.MEANS:
        yield partial(mean_is_right, case)
    yield losses.test_a_cap_bounds_what_16_bits_hold
    for change in losses._CHANGES:
        yield partial(refused, change)
    for what in ("labels", "weights"):
        yield partial(losses.test_alone_a_wrong_value_is_nan_and_then_an_error, what)
    yield losses.test_alone_a_label_that_is_no_class_has_nan_where_nobody_waits


def all_hear_of_a_wrong_type() -> None:
    from tests.support import threads
    from tests.training.test_losses import logprobs_of_a_wrong_type

    told, _ = threads.run(2, lambda ring: logprobs_of_a_wrong_type("chunk", ring))
    assert all("(on rank 1)" in text for text in told)


def goes_on() -> None:
    from tests.training import test_dataset

    with TemporaryDirectory() as folder:
        file = test_dataset.token_file(Path(folder))
        test_dataset.test_a_run_goes_on_with_other_rings("file", file)


def files_differ() -> None:
    from tests.training import test_dataset

    with TemporaryDirectory() as folder:
        test_dataset.test_ranks_that_read_other_files_hold_other_batches(Path(folder))


def raises(mistake: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"block|whole sequences"):
        mistake()


def recomputed() -> None:
    """Backward ignores an evaluation in its block, but not what a checkpoint left there."""
    from tests.training.test_batches import recomputed_after_evaluation, reentrant_outside

    recomputed_after_evaluation(reentrant=True)
    assert "inside `with batch:`" in reentrant_outside()


def whole_sequences() -> None:
    batch = _batch("plain")
    q = torch.randn(2, 60, 2, 8)
    from ring_attention_pytorch import ring_attn

    with batch:
        ring_attn(q, q, q, causal=True)


def backward_outside() -> None:
    from tests.support.training import Model, spread_attention

    batch, model = _batch("plain"), Model(spread_attention, checkpointed=True)
    with batch:
        loss = model(batch["input_ids"], batch["position_ids"]).sum()
    loss.backward()


def backward_elsewhere() -> None:
    from tests.support.training import Model, spread_attention

    batch, other, model = _batch("plain"), _batch("borders"), Model(spread_attention)
    with batch:
        loss = model(batch["input_ids"], batch["position_ids"]).sum()
    with other:
        loss.backward()


def a_plan_of_another() -> None:
    from ring_attention_pytorch import RingPlan, ring_attn
    from tests.support.training import LENGTH

    q = torch.randn(2, LENGTH, 2, 8)
    plan = RingPlan.make(q, q, q, causal=True, cu_seqlens=[0, 20, LENGTH])
    with _batch("borders"):
        ring_attn(q, q, q, plan=plan)


def _batch(kind: str):
    from ring_attention_pytorch import shard_batch
    from tests.support.training import batch_of

    return shard_batch(batch_of(kind))


if __name__ == "__main__":
    hunt.main("tests.faults.training")
