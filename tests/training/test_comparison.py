"""Digests that are read later in a step: another rank's batch is noticed in any case."""

import pickle
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attention_pytorch import ring_cross_entropy, ring_token_logprobs, shard_batch
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.training import comparison
from ring_attention_pytorch.training.comparison import UnreadDigest, digest_of_batch

IDS = torch.arange(2 * 12).view(2, 12)


def given(wrong: bool) -> dict[str, Tensor]:
    ids = IDS.clone()
    ids[1, 11] += wrong and dist.get_rank()
    return {"input_ids": ids, "labels": ids}


def loss(wrong: bool) -> None:
    with shard_batch(given(wrong)) as batch:
        x = torch.zeros(2, 6, 64, requires_grad=True)
        ring_cross_entropy(x, batch.labels)
        raise KeyError("the loss noticed nothing")


def logprobs(wrong: bool) -> None:
    batch = shard_batch(given(wrong))
    ring_token_logprobs(torch.zeros(2, 6, 64), batch)
    raise KeyError("the loss noticed nothing")


def no_loss(wrong: bool) -> None:
    with shard_batch(given(wrong)):
        pass


def no_block(wrong: bool) -> None:
    shard_batch(given(wrong))
    shard_batch(given(False))


def other_shapes(wrong: bool) -> None:
    n = 12 - 2 * (wrong and dist.get_rank())
    shard_batch({"input_ids": IDS[:, :n]})


def each_way() -> dict[str, tuple[list[str], list[str]]]:
    """For a pool: the error of a wrong batch, and notes of a right one, by the way it is used."""
    found, called = {}, []
    gather_notes = Ring.gather_notes

    def counted(self: Ring, caller: str, *more: object) -> list[bytes]:
        called.append(caller)
        return gather_notes(self, caller, *more)

    with (
        mock.patch.object(comparison, "reads_at_once", return_value=False),
        mock.patch.object(Ring, "gather_notes", counted),
    ):
        for use in (loss, logprobs, no_loss, no_block, other_shapes):
            errors = []
            for wrong in (True, False):
                called.clear()
                try:
                    use(wrong)
                except (ValueError, KeyError) as error:
                    errors.append(str(error))
            found[use.__name__] = errors, [*called]
    return found


def test_another_batch_is_noticed_in_the_loss_at_the_end_or_in_the_next_batch(
    pools: Callable,
) -> None:
    for found in pools(2).run(each_way):
        wanted = {
            "loss": "in the blocks of different batches", "logprobs": "batch (its digest)",
            "no_loss": comparison.WORDS, "no_block": "the batch before (its digest)",
            "other_shapes": comparison.WORDS,
        }  # fmt: skip
        for use, words in wanted.items():
            (first, *others), _ = found[use]
            assert words in first, (use, first)
            assert all("noticed nothing" in other for other in others), use
        notes = {use: callers for use, (_, callers) in found.items()}
        assert notes["loss"] == ["shard_batch", "ring_cross_entropy"]
        assert notes["no_loss"] == ["shard_batch", "a batch"]
        assert notes["no_block"] == ["shard_batch", "shard_batch"]


def test_a_digest_is_unread_only_if_the_host_has_no_other_reason_to_wait() -> None:
    with mock.patch.object(comparison, "reads_at_once", return_value=False):
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
