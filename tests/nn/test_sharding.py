"""shard_sequence and unshard_sequence: what goes where, and where gradients come from."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attention_pytorch import positions, shard_sequence, unshard_sequence
from ring_attention_pytorch.nn.sharding import AutoShard, smallest_ring
from ring_attention_pytorch.ranks.ring import Ring
from tests.support.module_cases import Errors, check, check_refused, traffic
from tests.support.reference import relative_error

LAYOUTS = ("contiguous", "striped", "zigzag")
LENGTHS = (0, 1, 2, 3, 5, 8, 13, 24)


def whole(length: int, dim: int, dtype: torch.dtype = torch.float64) -> Tensor:
    shape = [2, 3, 4]
    shape[dim] = length
    draw = torch.Generator().manual_seed(length)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=draw).to(dtype)


def round_trips(cases: list[tuple[str, int, int, torch.dtype]]) -> list[bool]:
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for layout, length, dim, dtype in cases:
        x = whole(length, dim, dtype)
        mine = shard_sequence(x, dim=dim, layout=layout)
        at = positions(layout, rank=rank, ring_size=size, length=length)
        back = unshard_sequence(mine, length=length, dim=dim, layout=layout)
        right = torch.equal(mine, x.index_select(dim, at)) and torch.equal(back, x)
        found.append(right and back.dtype == dtype)
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_is_sharded_comes_back(pools: Callable, size: int) -> None:
    cases = [
        (layout, n, dim, torch.float64)
        for layout, n, dim in product(LAYOUTS, LENGTHS, (0, 1, 2, -1))
    ]
    dtypes = (torch.int64, torch.int32, torch.bool, torch.bfloat16, torch.float16, torch.float32)
    cases += [(layout, 13, 1, dtype) for layout, dtype in product(LAYOUTS, dtypes)]
    for found in pools(size).run(round_trips, cases):
        assert [case for case, right in zip(cases, found) if not right] == []


def gradient_cases(cases: list[tuple[str, int, int]]) -> list[Errors]:
    """Every rank makes something else of the whole: its part gets the sum of what all made."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for layout, length, dim in cases:
        x = whole(length, dim)
        cotangents = torch.randn((size, *x.shape), generator=torch.Generator().manual_seed(9))
        cotangents = cotangents.to(x.dtype)
        mine = shard_sequence(x, dim=dim, layout=layout).requires_grad_()
        back = unshard_sequence(mine, length=length, dim=dim, layout=layout)
        back.backward(cotangents[rank])
        want = shard_sequence(cotangents.sum(0), dim=dim, layout=layout)
        errors = {"unshard": relative_error(mine.grad, want)}
        x.requires_grad_()
        mine = shard_sequence(x, dim=dim, layout=layout)
        mine.backward(torch.ones_like(mine))
        at = positions(layout, rank=rank, ring_size=size, length=length)
        want = torch.zeros_like(x).index_fill(dim, at, 1.0)
        found.append(errors | {"shard": relative_error(x.grad, want)})
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_part_gets_the_sum_of_every_ranks_gradient(pools: Callable, size: int) -> None:
    cases = list(product(LAYOUTS, (1, 3, 8, 13), (0, 1, 2)))
    check(pools(size), gradient_cases, cases)


def bfloat16_sum(layout: str) -> tuple[Tensor, Tensor, Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    cotangents = torch.randn((size, 1, 40, 8), generator=torch.Generator().manual_seed(0)) * 30
    cotangents = cotangents.bfloat16()
    mine = torch.zeros(1, 40 // size, 8, dtype=torch.bfloat16, requires_grad=True)
    unshard_sequence(mine, length=40, layout=layout).backward(cotangents[rank])
    exact = shard_sequence(cotangents.float().sum(0), layout=layout).bfloat16()
    rounded = cotangents[0].clone()
    for each in cotangents[1:]:
        rounded += each
    return mine.grad, exact, shard_sequence(rounded, layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_gradients_are_summed_in_float32_and_rounded_once(
    pools: Callable, layout: str
) -> None:
    for got, exact, rounded in pools(4).run(bfloat16_sum, layout):
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, exact)
        assert not torch.equal(got, rounded)


def repeated() -> bool:
    x = torch.randn((1, 12, 4), generator=torch.Generator().manual_seed(0))
    cotangent = torch.randn((1, 12, 4), generator=torch.Generator().manual_seed(dist.get_rank()))
    grads = []
    for _ in range(5):
        mine = shard_sequence(x).requires_grad_()
        unshard_sequence(mine, length=12).backward(cotangent)
        grads.append(mine.grad)
    return all(torch.equal(g, grads[0]) for g in grads)


def test_gradients_repeat_bit_for_bit(pools: Callable) -> None:
    assert pools(4).run(repeated) == [True] * 4


def in_groups(kind: str) -> list[bool]:
    rank, found = dist.get_rank(), []
    if kind == "ring":
        group: Any = Ring(None, 2)
        place = rank % 2
    else:
        group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        place = rank // 2
    for layout in LAYOUTS:
        x = torch.arange(11)[None]
        mine = shard_sequence(x, layout=layout, group=group)
        at = positions(layout, rank=place, ring_size=2, length=11)
        back = unshard_sequence(mine, length=11, layout=layout, group=group)
        found.append(torch.equal(mine[0], at) and torch.equal(back, x))
    return found


@pytest.mark.parametrize("kind", ["ring", "group"])
def test_any_group_may_share_a_sequence(pools: Callable, kind: str) -> None:
    assert pools(4).run(in_groups, kind) == [[True] * 3] * 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_alone_both_are_nothing(layout: str) -> None:
    x = torch.randn(2, 9, 3, requires_grad=True)
    mine = shard_sequence(x, layout=layout)
    back = unshard_sequence(mine, length=9, layout=layout)
    assert torch.equal(mine, x)
    assert torch.equal(back, x)
    cotangent = torch.randn(2, 9, 3)
    (grad,) = torch.autograd.grad(back, x, cotangent)
    assert torch.equal(grad, cotangent)


def travelled(length: int) -> tuple[int, int, list[int], int]:
    size = dist.get_world_size()
    x = torch.randn(1, length, 4, dtype=torch.float64)
    with traffic() as seen:
        mine = shard_sequence(x).requires_grad_()
    at_shard = len(seen.sent) + len(seen.gathered)
    with traffic() as seen:
        back = unshard_sequence(mine, length=length)
    with traffic() as of_backward:
        back.sum().backward()
    held = length // size
    unit = held * 4
    return (
        at_shard,
        sum(seen.floats_received()) // unit,
        seen.gathered,
        sum(of_backward.floats_received()) // unit,
    )


def test_sharding_sends_nothing_and_unsharding_only_parts(pools: Callable) -> None:
    for at_shard, forward, notes, backward in pools(4).run(travelled, 16):
        assert at_shard == 0
        assert forward == 3
        assert backward == 3
        assert len(notes) == 1
        assert max(notes) <= 4096


def misuse(name: str) -> None:
    odd_one, size = dist.get_rank() == 1, dist.get_world_size()
    x = torch.zeros(2, 12 // size, 4)
    call: dict[str, Any] = dict(length=12)
    if name == "unknown layout":
        call["layout"] = "spiral"
    if odd_one:
        call |= {
            "length": {"length": 11},
            "dim": {"dim": 1},
            "layout": {"layout": "striped"},
        }.get(name, {})
        x = {
            "values": x.to("meta"),
            "shape": x[..., :3],
            "dtype": x.double(),
            "part": x[:, 1:],
        }.get(name, x)
    if name == "no values":
        x = x.to("meta")
    if name == "dim" and not odd_one:
        x, call["dim"] = x.transpose(0, 1).contiguous(), 0
    unshard_sequence(x, **call)


REFUSED = {
    "unknown layout": "or made by balanced(), got 'spiral'",
    "length": "unshard_sequence: ",
    "dim": "dim must be the same on every rank",
    "layout": "layout must be the same on every rank",
    "shape": "the rest of x's shape must be the same on every rank",
    "dtype": "dtype must be the same on every rank",
    "part": "tokens on the ranks, rank 1 has",
    "values": "x must have values to be sent, got a Tensor on meta (on rank 1)",
    "no values": "x must have values to be sent, got a Tensor on meta",
}


@pytest.mark.parametrize("size", [2, 4])
def test_what_cannot_be_is_refused_in_the_same_words_on_all_ranks(
    pools: Callable, size: int
) -> None:
    check_refused(pools(size), misuse, REFUSED)


def test_an_unknown_layout_is_refused_before_anything_else() -> None:
    with pytest.raises(ValueError, match="shard_sequence: layout must be one of"):
        shard_sequence(torch.zeros(1, 4), layout="spiral")


def test_the_smallest_ring_is_a_divisor_that_holds_the_sequence() -> None:
    for world, length, held in product((1, 2, 3, 4, 6, 8, 12), range(0, 40, 3), (1, 4, 7)):
        size = smallest_ring(length, held, world)
        assert world % size == 0
        assert size * held >= length or size == world
        smaller = [s for s in range(1, size) if world % s == 0]
        assert all(s * held < length for s in smaller)


def automatic(cases: list[tuple[str, int | None]]) -> list[Errors]:
    """Whole batches to parts and back, and the gradient of the trip."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for layout, ring_size in cases:
        sizes, n = [(2, 1, 3, 0)[r] for r in range(size)], 13
        draw = torch.Generator().manual_seed(0)
        everyones = [torch.randn((b, n, 3), generator=draw, dtype=torch.float64) for b in sizes]
        x = everyones[rank].clone().requires_grad_()
        shards = AutoShard.make(
            x, ring_seq_size=100, layout=layout, group=None, ring_size=ring_size, same={}
        )
        first = rank - rank % ring_size
        at = positions(layout, rank=rank - first, ring_size=ring_size, length=n)
        mine = shards.shard(x)
        want = torch.cat(everyones[first : first + ring_size])[:, at]
        back = shards.unshard(mine * 2)
        cotangent = torch.randn((*x.shape,), dtype=torch.float64)
        back.backward(cotangent)
        found.append(
            {
                "shard": relative_error(mine, want),
                "back": relative_error(back, x * 2),
                "dx": relative_error(x.grad, cotangent * 2),
                "positions": relative_error(shards.positions(), at),
            }
        )
    return found


def test_automatic_sharding_deals_every_batch_to_its_ring_and_back(pools: Callable) -> None:
    check(pools(4), automatic, list(product(LAYOUTS, (1, 2, 4))))
    check(pools(3), automatic, list(product(LAYOUTS, (1, 3))))
