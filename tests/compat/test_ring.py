"""Tensors that are passed round a ring, and their gradients back."""

from collections.abc import Callable

import pytest
import torch
from ring_attention_pytorch.distributed import get_rank, get_world_size
from ring_attention_pytorch.ring import (
    all_ring_pass,
    circular_index_left,
    circular_index_right,
    circular_rank_left,
    circular_rank_right,
    null_ring_pass,
    one_ring_pass,
    ring_pass,
    send_and_receive_,
)

from tests.support.original import Errors, check
from tests.support.reference import relative_error


def passed(ring_size: int) -> Errors:
    rank = get_rank()
    first, place, found = rank - rank % ring_size, rank % ring_size, {}
    x = torch.full((2, 3), float(rank), dtype=torch.float64).requires_grad_()
    for by in (1, 2, -1, 0, ring_size + 1):
        x.grad = None
        buffer = torch.full_like(x, -1.0).detach() if by == 1 else None
        kept = buffer
        got, sent = ring_pass(by, x, buffer, ring_size)
        assert sent is x
        assert kept is None or got.data_ptr() == kept.data_ptr()
        got.backward(torch.full_like(x, rank + 0.5))
        left, right = (first + (place + way) % ring_size for way in (-by, by))
        found[f"{by}"] = relative_error(got, torch.full_like(x, left))
        found[f"{by} d"] = relative_error(x.grad, torch.full_like(x, right + 0.5))
        assert circular_rank_left(ring_size=ring_size, num=by) == left
        assert circular_rank_right(ring_size=ring_size, num=by) == right
    assert one_ring_pass(x.T, ring_size=ring_size)[0].shape == (3, 2)
    buffer = torch.empty_like(x)
    send_and_receive_(x, buffer, circular_rank_right(), circular_rank_left())
    found["sent"] = relative_error(buffer, torch.full_like(x, circular_rank_left()))
    assert not buffer.requires_grad
    return found


@pytest.mark.parametrize(("size", "ring_size"), [(4, 4), (4, 2), (4, 1), (2, 2)])
def test_a_ring_pass_goes_so_far_as_it_says_and_its_gradient_back(
    pools: Callable, size: int, ring_size: int
) -> None:
    check(pools(size).run(passed, ring_size))


def went_round(ring_size: int, max_iters: int | None) -> Errors:
    """Dense attention from `all_ring_pass`: scores of all owners, whose places say who they are."""
    rank = get_rank()
    first, found = rank - rank % ring_size, {}
    draw = torch.Generator().manual_seed(2)
    x = torch.randn((get_world_size(), 2, 3), generator=draw, dtype=torch.float64)
    mine, mask = x[rank].clone().requires_grad_(), x[rank] > 0
    buffers = (torch.empty(2, 3, dtype=torch.float64), None, None)
    hops = all_ring_pass(
        mine, None, mask, max_iters=max_iters, receive_buffers=buffers, ring_size=ring_size
    )
    total, owners, flags = 0.0, [], []
    for (owner, about), ((t, nothing, seen), (_, _, _)) in hops:
        assert nothing is None
        assert torch.equal(seen, t > 0)
        found[f"{owner}"] = relative_error(t, x[first + owner])
        total = total + (t**2 * (rank + 1.0)).sum()
        owners.append(owner)
        flags.append(about)
    iters = max(1, min(ring_size, ring_size if max_iters is None else max_iters))
    assert owners == [(rank - first - hop) % ring_size for hop in range(iters)]
    assert flags == [(hop == 0, hop == iters - 1) for hop in range(iters)]
    total.backward()
    reach = [first + (rank - first + hop) % ring_size for hop in range(iters)]  # whom mine came to
    want = 2 * x[rank] * sum(r + 1.0 for r in reach)
    return found | {"d": relative_error(mine.grad, want), "mine": relative_error(mine, x[rank])}


@pytest.mark.parametrize(("ring_size", "iters"), [(4, None), (4, 2), (2, None), (2, 9), (1, None)])
def test_all_ring_pass_brings_the_ring_s_tensors_in_order(
    pools: Callable, ring_size: int, iters: int | None
) -> None:
    check(pools(4).run(went_round, ring_size, iters))


def test_null_ring_pass_brings_what_it_was_given() -> None:
    x = torch.randn(2)
    ((info, ((got, nothing), buffers)),) = null_ring_pass(x, None, ring_size=7)
    assert got is x
    assert nothing is None
    assert (info.ring_rank, info.iter_info, buffers) == (0, (True, True), (None, None))


def test_circular_indices() -> None:
    assert [circular_index_left(p, 4) for p in range(4)] == [3, 0, 1, 2]
    assert [circular_index_right(p, 4, 2) for p in range(4)] == [2, 3, 0, 1]
    assert [circular_rank_left(r, 4) for r in range(8)] == [3, 0, 1, 2, 7, 4, 5, 6]
    assert (circular_rank_left(), circular_rank_right()) == (0, 0)
    with pytest.raises(ValueError, match="ring_size must be at least 1, got 0"):
        circular_rank_left(1, 0)
