"""Batches that are sharded by hand come home."""

from collections.abc import Callable

import pytest
from ring_attention_pytorch.distributed import get_rank, get_world_size
from ring_attention_pytorch.ring_attention import (
    maybe_pad_seq_and_mask,
    sharded_batch_to_sharded_seq,
    sharded_seq_to_sharded_batch,
)

from ring_attention_pytorch import ring_flash_attn
from tests.support.original import Errors, check, everyones
from tests.support.reference import dense_attention, relative_error


def sharded_by_hand(n: int, seq_size: int, rings: int) -> Errors:
    """A ring's attention on what `sharded_batch_to_sharded_seq` gives, and home again."""
    rank, size = get_rank(), get_world_size()
    xs = everyones(rings < size, n, 4, 8)
    cotangents = [-t.flip(0) for t in everyones(rings < size, n, 4, 8)]
    masks = [x[:, :, 0, 0] > -1 for x in xs]
    mine = xs[rank].clone().requires_grad_()
    padded, mask = maybe_pad_seq_and_mask(mine, masks[rank], seq_size)
    (x, mask), sizes, found_rings = sharded_batch_to_sharded_seq(padded, mask, seq_size)
    assert found_rings == rings
    assert sizes.tolist() == [len(t) for t in xs]
    out = ring_flash_attn(x, x, x, mask, ring_reduce_col=True, ring_size=size // rings)
    out = sharded_seq_to_sharded_batch(out.flatten(2), sizes, rings)[:, :n]
    out.backward(cotangents[rank].flatten(2))
    own = xs[rank].requires_grad_()
    want = dense_attention(own, own, own, key_mask=masks[rank])[0]
    want.backward(cotangents[rank])
    return {"out": relative_error(out, want.flatten(2)), "dx": relative_error(mine.grad, own.grad)}


@pytest.mark.parametrize(("n", "seq_size", "rings"), [(11, 3, 1), (11, 6, 2), (3, 4, 4)])
def test_batches_are_sharded_by_hand_and_come_home(
    pools: Callable, n: int, seq_size: int, rings: int
) -> None:
    check(pools(4).run(sharded_by_hand, n, seq_size, rings))
