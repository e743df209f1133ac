"""Pieces that ranks exchange are where they belong, and so are gradients: as of whole tensors."""

from unittest import mock

import pytest
import torch
from hypothesis import given as drawing
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from ring_attention_pytorch.comm.collectives import (
    all_gather,
    all_gather_along,
    all_to_all,
    fill_in,
    gather_to_merge,
    scatter_rows,
    sum_on_owners,
    sum_over_ranks,
    sum_parts,
)
from ring_attention_pytorch.ranks.failures import Step
from ring_attention_pytorch.ranks.ring import Caller, Ring
from ring_attention_pytorch.schedule import relays
from ring_attention_pytorch.schedule.passing import merging_machines, passes_spare
from ring_attention_pytorch.schedule.relays import members, relay
from tests.support import threads
from tests.support.over_machines import far, placed

WIDTH = 2


def called(ring: Ring) -> Caller:
    return Caller(ring, "a test", 7)


def drawn(seed: int, *shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def rows(sender: int, receiver: int) -> int:
    """Return how many rows go from one rank to another: none between some."""
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
        received = all_to_all(list(mine), shapes, called(ring))
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
        parts = all_gather(x.t(), [(WIDTH, r + 1) for r in range(size)], called(ring))
        whole = all_gather_along(-1, x.t(), range(1, size + 1), called(ring))
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


@pytest.mark.parametrize("dim", [0, 1, 2, -2])
def test_parts_are_joined_along_any_dimension(dim):
    lengths = 2, 0, 3

    def part(rank: int) -> Tensor:
        shape = [4, 5, 3]
        shape[dim] = lengths[rank]
        return drawn(rank, *shape)

    found, _ = threads.run(
        3, lambda ring: all_gather_along(dim, part(ring.rank), lengths, called(ring))
    )
    for each in found:
        assert torch.equal(each, torch.cat([part(rank) for rank in range(3)], dim))


WAYS = {
    "all_to_all": lambda x, by: all_to_all([x] * by.ring.size, [x.shape] * by.ring.size, by)[0],
    "all_gather": lambda x, by: all_gather(x, [x.shape] * by.ring.size, by)[0],
    "sum_on_owners": lambda x, by: sum_on_owners([x] * by.ring.size, by)[0],
    "sum_over_ranks": lambda x, by: sum_over_ranks([x], by)[0],
}


@pytest.mark.parametrize("way", WAYS)
def test_messages_are_one_exchange_of_a_call_which_errors_name(way):
    """The tensor is not contiguous, and messages must be."""

    def rank_main(ring: Ring) -> Step:
        WAYS[way](drawn(ring.rank, 2, 3).t(), Caller(ring, "a test", 7))
        return ring.steps.now

    assert threads.run(3, rank_main)[0] == [Step("a test", plan=7, call=1, hop=1)] * 3


@pytest.mark.parametrize("way", ["all_to_all", "all_gather"])
def test_a_backward_s_call_says_of_which_forward_it_is_and_so_does_the_backward_of_it(way):
    def rank_main(ring: Ring) -> list[Step]:
        x = drawn(ring.rank, 2, 3).requires_grad_()
        found, steps = [WAYS[way](x, Caller(ring, "a test", 7)) for _ in range(2)], []
        (grad,) = torch.autograd.grad(found[0].square().sum(), x, create_graph=True)
        steps.append(ring.steps.now)
        torch.autograd.grad(grad.square().sum(), x)
        return [*steps, ring.steps.now]

    of = 1, 3, 1  # before any agreement
    backward = [Step("a test, backward", 7, 2 + i, 1, of[i - 1]) for i in (1, 2)]
    found = threads.run(3, rank_main)[0]
    assert [each[0] for each in found] == backward[:1] * 3
    assert {each[1].back_of for each in found} <= {*of}  # of the first call, or of its backward


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_alone_gets_its_own_tensor(way):
    x = drawn(0, 1, WIDTH)
    assert WAYS[way](x, called(Ring.alone())) is x


@pytest.mark.parametrize("counts", [(3,), (2, 0, 1)])
def test_rows_of_all_ranks_and_their_sums_on_owners(counts):
    every = drawn(0, 3, WIDTH)

    def rank_main(ring: Ring) -> tuple[Tensor, Tensor]:
        first = sum(counts[: ring.rank])
        own = slice(first, first + counts[ring.rank])
        found = torch.full_like(every, torch.nan)
        found[own] = every[own]
        fill_in(found, counts, called(ring))
        parts = ((ring.rank + 1) * every).split(counts)
        (summed,) = sum_on_owners(parts, called(ring))
        assert torch.equal(summed, sum(rank + 1 for rank in range(ring.size)) * every[own])
        return found, summed

    for found, _ in threads.run(len(counts), rank_main)[0]:
        assert torch.equal(found, every)


def test_rows_land_where_they_are_told_and_others_stay():
    def rank_main(ring: Ring) -> tuple[Tensor, Tensor]:
        pieces = [torch.full((1, WIDTH), 10.0 * ring.rank + to) for to in range(3)]
        lands = [torch.tensor([(r + ring.rank) % 4]) for r in range(3)]
        onto = torch.full((4, WIDTH), -1.0, dtype=torch.float64)
        return scatter_rows(pieces, lands, onto, called(ring)), onto

    for rank, (found, onto) in enumerate(threads.run(3, rank_main)[0]):
        want = [[10.0 * ((at - rank) % 4) + rank] * WIDTH for at in range(4)]
        want[(3 + rank) % 4] = [-1.0] * WIDTH
        assert found.tolist() == want
        assert onto.eq(-1).all()


@pytest.mark.parametrize("size", [1, 3])
def test_sums_and_parts_are_the_same_on_all_ranks(size):
    def rank_main(ring: Ring) -> tuple[Tensor, Tensor]:
        x = drawn(ring.rank, 5).float()
        parts = gather_to_merge(x, ring, None, lambda parts: parts)
        return sum_over_ranks([x], called(ring))[0], parts

    xs = torch.stack([drawn(r, 5).float() for r in range(size)])
    in_order = xs[0]
    for x in xs[1:]:
        in_order = in_order + x
    for total, parts in threads.run(size, rank_main)[0]:
        assert torch.equal(total, in_order)
        assert torch.equal(parts, xs)


@settings(max_examples=60, deadline=None)
@drawing(placed, st.integers(0, 9))
def test_parts_to_merge_are_of_ranks_or_where_several_share_one_of_machines(machines, length):
    """A machine has one part, and it crosses once to each other machine."""
    xs = torch.stack([drawn(rank, length, 1) for rank in range(len(machines))])

    def rank_main(ring: Ring) -> tuple[Tensor, int]:
        merging = merging_machines(ring.machines, xs[0].nbytes)
        found = gather_to_merge(xs[ring.rank], ring, merging, lambda parts: parts.sum(dim=0))
        return found, far(ring)

    with mock.patch.object(relays, "_EXCHANGE", 0):
        results, _ = threads.run(len(machines), rank_main, machines)
    apart = len({*machines}) in (1, len(machines))
    of = torch.tensor([*range(len(machines))] if apart else machines)
    parts = 1 + int(of.max())
    want = torch.zeros(parts, length, 1, dtype=xs.dtype).index_add_(0, of, xs)
    for found, crossed in results:
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
        assert torch.equal(found, results[0][0])
        assert crossed == (parts * (parts - 1) * xs[0].nbytes if 1 + max(machines) > 1 else 0)


# the machine of each rank, and how many rows it has
spread = placed.flatmap(
    lambda machines: st.tuples(st.just(machines), st.tuples(*[st.integers(0, 3)] * len(machines)))
)


def across_once(machines: tuple[int, ...], counts: tuple[int, ...], row: int) -> int:
    """Bytes that cross when each rank's rows do so once to each machine."""
    return sum(counts) * row * (len({*machines}) - 1)


@settings(max_examples=60, deadline=None)
@drawing(spread)
def test_parts_cross_to_a_machine_once_and_so_do_derivatives(drawn_of):
    machines, counts = drawn_of
    ranks = range(len(machines))
    xs = [drawn(rank, rows, WIDTH).requires_grad_() for rank, rows in enumerate(counts)]
    weights = [[drawn(90 + 9 * r + o, n, WIDTH) for o, n in enumerate(counts)] for r in ranks]

    def loss(parts: list[Tensor], rank: int) -> Tensor:
        return sum((w * part**3).sum() for w, part in zip(weights[rank], parts, strict=True))

    def rank_main(ring: Ring) -> tuple[list[Tensor], list[int]]:
        x, crossed = drawn(ring.rank, counts[ring.rank], WIDTH).requires_grad_(), [far(ring)]
        parts = all_gather(x, [(n, WIDTH) for n in counts], called(ring))
        crossed.append(far(ring))
        (first,) = torch.autograd.grad(loss(parts, ring.rank), x, create_graph=True)
        crossed.append(far(ring))
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return [*parts, first, second], [*crossed, far(ring)]

    with mock.patch.object(relays, "_EXCHANGE", 0):
        found, _ = threads.run(len(machines), rank_main, machines)
    grads = with_gradients(sum(loss(xs, rank) for rank in ranks), *xs)
    once = across_once(machines, counts, 8 * WIDTH)
    for rank, (got, crossed) in enumerate(found):
        wanted = [*xs, grads[rank], grads[len(xs) + rank]]
        for each, want in zip(got, wanted, strict=True):
            torch.testing.assert_close(each, want, rtol=1e-12, atol=1e-12)
        assert crossed == [0, once, 2 * once, 4 * once]


@settings(max_examples=60, deadline=None)
@drawing(spread, st.sampled_from([torch.float32, torch.bfloat16]))
def test_rows_of_all_machines_and_their_sums_in_one_order(drawn_of, dtype):
    machines, counts = drawn_of
    size, total = len(machines), sum(counts)
    every = [drawn(rank, total, WIDTH).to(dtype) for rank in range(size)]

    def rank_main(ring: Ring) -> tuple[Tensor, Tensor, int]:
        whole = torch.full((total, WIDTH), torch.nan, dtype=dtype)
        own = slice(first := sum(counts[: ring.rank]), first + counts[ring.rank])
        whole[own] = every[0][own]
        fill_in(whole, counts, called(ring))
        (summed,) = sum_on_owners(every[ring.rank].split(counts), called(ring))
        return whole, summed, far(ring)

    with mock.patch.object(relays, "_EXCHANGE", 0):
        found, _ = threads.run(size, rank_main, machines)
    for rank, (whole, summed, crossed) in enumerate(found):
        assert torch.equal(whole, every[0])
        parts = {other: every[other] for other in members(machines, machines[rank])}
        for machine in {*machines} - {machines[rank]}:
            of_machine = [every[other] for other in members(machines, machine)]
            parts[relay(machines, machine, rank)] = sum_parts(of_machine)
        first = sum(counts[:rank])
        want = sum_parts([parts[other] for other in sorted(parts)])[first : first + counts[rank]]
        assert torch.equal(summed, want)
        assert crossed == 2 * across_once(machines, counts, dtype.itemsize * WIDTH)


@pytest.mark.parametrize("exchange", [0, 1 << 40])
def test_small_parts_are_sent_directly(exchange, monkeypatch):
    machines, x = (0, 0, 1, 1, 1), drawn(0, 4)
    monkeypatch.setattr(relays, "_EXCHANGE", exchange)
    _, hub = threads.run(5, lambda ring: sum_over_ranks([x], called(ring)), machines)
    assert passes_spare(machines)
    assert hub.exchanges == [1 if exchange else 3] * 5


def test_a_machine_s_sum_in_16_bits_may_be_larger_than_the_whole(monkeypatch):
    """In float16 80,000 is infinite; the sum is 40,000."""
    monkeypatch.setattr(relays, "_EXCHANGE", 0)

    def rank_main(ring: Ring) -> list[float]:
        rows = torch.full((3, 1), 4e4 if ring.rank < 2 else -4e4, dtype=torch.float16)
        (summed,) = sum_on_owners(rows.split(1), called(ring))
        (total,) = sum_over_ranks([rows], called(ring))
        assert total.dtype == summed.dtype == rows.dtype
        return [summed.item(), *total.flatten().tolist()]

    assert threads.run(3, rank_main, (0, 0, 1))[0] == [[4e4] * 4] * 3
