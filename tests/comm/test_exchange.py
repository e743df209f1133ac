"""Pieces that ranks exchange are where they belong, and so are gradients: as of whole tensors."""

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch.comm.exchange import (
    all_gather,
    all_gather_along,
    all_gather_stacked,
    all_to_all,
    fill_in,
    gather_to_merge,
    scatter_rows,
    sum_over_ranks,
    summed_by_owners,
)
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.schedule import relays
from ring_attention_pytorch.schedule.relays import merge_route
from tests.support import threads

WIDTH = 2


def drawn(seed: int, *shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def rows(sender: int, receiver: int) -> int:
    """How many rows go from one rank to another: none between some."""
    return (sender + 2 * receiver) % 3


def with_gradients(loss: Tensor, *given: Tensor) -> list[Tensor]:
    """Gradients, and those of the sum of their squares."""
    first = torch.autograd.grad(loss, given, create_graph=True)
    return [*first, *torch.autograd.grad(sum(t.square().sum() for t in first), given)]


def given(size: int) -> list[list[Tensor]]:
    """Each rank's piece for each rank."""
    return [
        [drawn(9 * r + to, rows(r, to), WIDTH).requires_grad_() for to in range(size)]
        for r in range(size)
    ]


def weights(rank: int, size: int) -> list[Tensor]:
    return [drawn(100 + 9 * rank + r, rows(r, rank), WIDTH) for r in range(size)]


def loss_of(received: list[Tensor], rank: int, size: int) -> Tensor:
    return sum((w * t**3).sum() for w, t in zip(weights(rank, size), received))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_pieces_go_to_their_ranks_and_gradients_home(size):
    def rank_main(ring: Ring) -> list[Tensor]:
        mine = given(size)[ring.rank]
        shapes = [(rows(r, ring.rank), WIDTH) for r in range(size)]
        received = all_to_all(list(mine), shapes, ring)
        return [*received, *with_gradients(loss_of(received, ring.rank, size), *mine)]

    pieces = given(size)
    came = [[pieces[r][to] for r in range(size)] for to in range(size)]
    loss = sum(loss_of(each, rank, size) for rank, each in enumerate(came))
    grads = with_gradients(loss, *(t for each in pieces for t in each))
    for rank, found in enumerate(threads.run(size, rank_main)[0]):
        first, second = (grads[i + size * rank :][:size] for i in (0, size * size))
        for got, want in zip(found, [*came[rank], *first, *second], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("size", [1, 3])
def test_what_is_gathered_has_the_gradients_of_all_ranks(size):
    def rank_main(ring: Ring) -> list[Tensor]:
        x = drawn(ring.rank, ring.rank + 1, WIDTH).requires_grad_()
        parts = all_gather(x.t(), [(WIDTH, r + 1) for r in range(size)], ring)
        whole = all_gather_along(-1, x.t(), range(1, size + 1), ring)
        torch.testing.assert_close(whole, torch.cat(parts, 1), rtol=0, atol=0)
        loss = (ring.rank + 1) * (whole**3).sum()
        return [*parts, *with_gradients(loss, x)]

    xs = [drawn(r, r + 1, WIDTH).requires_grad_() for r in range(size)]
    total = size * (size + 1) / 2  # of the ranks' factors
    grads = with_gradients(total * sum((x**3).sum() for x in xs), *xs)
    for rank, found in enumerate(threads.run(size, rank_main)[0]):
        want = [*(x.t() for x in xs), grads[rank], grads[size + rank]]
        for got, wanted in zip(found, want, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("counts", [(3,), (2, 0, 1)])
def test_rows_of_all_ranks_and_their_sums_on_owners(counts):
    every = drawn(0, 3, WIDTH)

    def rank_main(ring: Ring) -> tuple[Tensor, Tensor]:
        first = sum(counts[: ring.rank])
        own = slice(first, first + counts[ring.rank])
        found = torch.full_like(every, torch.nan)
        found[own] = every[own]
        fill_in(found, counts, ring, "a test")
        summed = summed_by_owners((ring.rank + 1) * every, counts, ring, "a test")
        assert torch.equal(summed, sum(rank + 1 for rank in range(ring.size)) * every[own])
        return found, summed

    for found, _ in threads.run(len(counts), rank_main)[0]:
        assert torch.equal(found, every)


def test_rows_land_where_they_are_told_and_others_stay():
    def rank_main(ring: Ring) -> tuple[Tensor, Tensor]:
        pieces = [torch.full((1, WIDTH), 10.0 * ring.rank + to) for to in range(3)]
        lands = [torch.tensor([(r + ring.rank) % 4]) for r in range(3)]
        onto = torch.full((4, WIDTH), -1.0, dtype=torch.float64)
        return scatter_rows(pieces, lands, onto, ring), onto

    for rank, (found, onto) in enumerate(threads.run(3, rank_main)[0]):
        want = [[10.0 * ((at - rank) % 4) + rank] * WIDTH for at in range(4)]
        want[(3 + rank) % 4] = [-1.0] * WIDTH
        assert found.tolist() == want
        assert onto.eq(-1).all()


@pytest.mark.parametrize("size", [1, 3])
def test_sums_and_stacks_are_the_same_on_all_ranks(size):
    def rank_main(ring: Ring) -> tuple[Tensor, Tensor]:
        x = drawn(ring.rank, 5).float()
        stacked = all_gather_stacked(x, ring)
        return sum_over_ranks(x, ring), stacked

    xs = torch.stack([drawn(r, 5).float() for r in range(size)])
    in_order = xs[0]
    for x in xs[1:]:
        in_order = in_order + x
    for total, stacked in threads.run(size, rank_main)[0]:
        assert torch.equal(total, in_order)
        assert torch.equal(stacked, xs)


@pytest.mark.parametrize("machines", [(0, 0, 1, 1), (0, 1, 0, 0, 2), (0, 0), (0, 1)])
def test_parts_to_merge_are_of_ranks_or_where_several_share_one_of_machines(machines, monkeypatch):
    xs = torch.stack([drawn(rank, 3) for rank in range(len(machines))])

    def rank_main(ring: Ring) -> Tensor:
        route = merge_route(ring.machines, ring.rank, xs[0].nbytes)
        return gather_to_merge(xs[ring.rank], ring, route, lambda parts: parts.sum(dim=0))

    monkeypatch.setattr(relays, "_EXCHANGE", 0)
    apart = len({*machines}) in (1, len(machines))
    of = torch.tensor([*range(len(machines))] if apart else machines)
    want = torch.zeros(1 + int(of.max()), 3, dtype=xs.dtype).index_add_(0, of, xs)
    for found in threads.run(len(machines), rank_main, machines)[0]:
        torch.testing.assert_close(found, want, rtol=1e-14, atol=0)
