"""Digests that are read later in a step: another rank's batch is noticed in any case."""

import pickle
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import (
    ring_attn,
    ring_cross_entropy,
    ring_token_logprobs,
    shard_batch,
)
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.training import comparison
from ring_attention_pytorch.training.comparison import UnreadDigest, digest_of_batch
from tests.support import threads

IDS = torch.arange(2 * 12).view(2, 12)


def given(ring: Ring, wrong: bool) -> dict[str, Tensor]:
    ids = IDS.clone()
    ids[1, 11] += wrong and ring.rank
    return {"input_ids": ids, "labels": ids}


def loss(ring: Ring, wrong: bool) -> None:
    with shard_batch(given(ring, wrong), group=ring) as batch:
        ring_cross_entropy(torch.zeros(2, 6, 64), batch.labels, group=ring)


def logprobs(ring: Ring, wrong: bool) -> None:
    ring_token_logprobs(torch.zeros(2, 6, 64), shard_batch(given(ring, wrong), group=ring))


def no_loss(ring: Ring, wrong: bool) -> None:
    with shard_batch(given(ring, wrong), group=ring):
        pass


def no_block(ring: Ring, wrong: bool) -> None:
    shard_batch(given(ring, wrong), group=ring)
    shard_batch(given(ring, False), group=ring)


def loss_without_block(ring: Ring, wrong: bool) -> None:
    batch = shard_batch(given(ring, wrong), group=ring)
    ring_cross_entropy(torch.zeros(2, 6, 64), batch.labels, group=ring)


def attention_without_block(ring: Ring, wrong: bool) -> None:
    batch, q = shard_batch(given(ring, wrong), group=ring), torch.zeros(2, 6, 1, 8)
    ring_attn(q, q, q, causal=True, layout=batch.layout, group=ring)


def other_shapes(ring: Ring, wrong: bool) -> None:
    shard_batch({"input_ids": IDS[:, : 12 - 2 * (wrong and ring.rank)]}, group=ring)


BEFORE = "the batch before (its digest)"
WAYS = {
    loss: ("in the blocks of different batches", ["shard_batch", "ring_cross_entropy"]),
    logprobs: ("batch (its digest)", ["shard_batch", "ring_token_logprobs", "unshard_sequence"]),
    no_loss: (comparison.WORDS, ["shard_batch", "a batch"]),
    no_block: (BEFORE, ["shard_batch", "shard_batch"]),
    loss_without_block: (BEFORE, ["shard_batch", "ring_cross_entropy"]),
    attention_without_block: (BEFORE, ["shard_batch", "ring attention"]),
    other_shapes: (
        "length must be the same on every rank, got 12 on",
        ["shard_batch"],
    ),
}


def compared(use: Callable[[Ring, bool], None], ring: Ring) -> tuple[str, list[str]]:
    """Return the error of a wrong batch, and the notes of a right one, which has no error."""
    found, called, exchange = "", [], ring.gather_notes
    try:
        use(ring, True)
    except ValueError as error:
        found = str(error)
    ring.gather_notes = lambda caller, *more: (called.append(caller), exchange(caller, *more))[1]
    use(ring, False)
    return found, called


@pytest.mark.parametrize("use", WAYS)
def test_another_batch_is_noticed_in_the_block_or_in_the_next_agreement(
    use: Callable[[Ring, bool], None],
) -> None:
    words, notes = WAYS[use]
    with mock.patch.object(comparison, "_HOST", set()):
        for error, called in threads.run(2, partial(compared, use))[0]:
            assert words in error
            assert called == notes


def waits_in_a_block(ring: Ring) -> list[bool]:
    """Whether ranks have compared a batch: before its block, after attention in it, and a loss."""
    from ring_attention_pytorch.integrations.transformers import ring_forward

    batch, q = shard_batch(given(ring, False), group=ring), torch.zeros(2, 6, 1, 8)
    assert isinstance(batch.digest, UnreadDigest)
    ring_forward(batch)
    found = [batch.digest.compared]
    with batch:
        ring_attn(q, q, q, causal=True, group=ring)
        found.append(batch.digest.compared)
        ring_cross_entropy(torch.zeros(2, 6, 64), batch.labels, group=ring)
        found.append(batch.digest.compared)
    return found


def test_in_a_block_nothing_reads_a_digest_before_the_loss() -> None:
    pytest.importorskip("transformers")
    with mock.patch.object(comparison, "_HOST", set()):
        assert threads.run(2, waits_in_a_block)[0] == [[False, False, True]] * 2


def step_that_one_rank_fails(ring: Ring) -> str:
    """A rank fails in its block, others wait in the loss; what the next step raises."""
    with suppress(ValueError), shard_batch(given(ring, False), group=ring) as batch:
        if ring.rank:
            raise ValueError
        ring_cross_entropy(torch.zeros(2, 6, 64), batch.labels, group=ring)
    with suppress(ValueError):
        if ring.rank:
            shard_batch(given(ring, False), group=ring)
    try:
        loss(ring, False)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_the_step_after_one_that_failed_on_a_rank_is_right() -> None:
    with mock.patch.object(comparison, "_HOST", set()):
        assert threads.run(2, step_that_one_rank_fails)[0] == ["nothing"] * 2


def test_a_digest_is_unread_only_if_the_host_has_no_other_reason_to_wait() -> None:
    with mock.patch.object(comparison, "_HOST", set()):
        unread = digest_of_batch({"input_ids": IDS}, "zigzag", at_once=False)
        assert isinstance(unread, UnreadDigest)
        assert pickle.loads(pickle.dumps(unread)) == int(unread)
        for name in ("attention_mask", "position_ids", "documents", "cu_seqlens"):
            read = digest_of_batch({"input_ids": IDS, name: IDS}, at_once=False)
            assert isinstance(read, int), name
        assert isinstance(digest_of_batch({"input_ids": IDS}, at_once=True), int)
        others = [{"input_ids": IDS + 1}, {"input_ids": IDS.int()}, {"inputs": IDS}]
        seen = {int(digest_of_batch(batch, "zigzag", at_once=False)) for batch in others}
        seen.add(int(digest_of_batch({"input_ids": IDS}, "contiguous", at_once=False)))
        assert len(seen | {int(unread)}) == 5
    assert isinstance(digest_of_batch({"input_ids": IDS}, at_once=False), int)
