"""An all-to-all written by hand: ranks have some tokens of all heads, and get all of one head."""

from collections.abc import Callable

import torch
from torch import Tensor

from ring_attention_pytorch.comm.all_to_all import CopyPlan
from ring_attention_pytorch.comm.fabric import Fabric
from ring_attention_pytorch.comm.fused_copies import Move
from tests.support import threads

TOKENS = (3, 0, 5)  # of each rank


def one_head_each(tokens: tuple[int, ...] = TOKENS) -> CopyPlan:
    """Plan that rank r gets head r of the whole sequence."""
    size, total = len(tokens), sum(tokens)
    starts = [sum(tokens[:rank]) for rank in range(size)]
    moves = tuple(
        tuple(
            Move(p, slice(0, n), slice(r, r + 1), slice(starts[p], starts[p] + n), slice(0, 1))
            for p, n in enumerate(tokens)
        )
        for r in range(size)
    )
    return CopyPlan(tuple((n, size) for n in tokens), ((total, 1),) * size, moves)


def wholes() -> list[Tensor]:
    """Two tensors of whole sequences, one of them without a last dimension."""
    draw = torch.Generator().manual_seed(0)
    shape = 2, sum(TOKENS), len(TOKENS)
    return [torch.randn(shape + more, generator=draw) for more in ((4,), ())]


def parts(whole: Tensor) -> tuple[Tensor, ...]:
    """Return what each rank has of a whole."""
    return whole.split(TOKENS, dim=1)


def swapped(fabric_of: Callable[[threads.ThreadRing], Fabric]) -> list[list[Tensor]]:
    """Return what each rank of threads gets of both wholes, over a fabric."""
    plan = one_head_each()

    def main(ring: threads.ThreadRing) -> list[Tensor]:
        mine = [parts(whole)[ring.rank] for whole in wholes()]
        rooms = [plan.alloc(t, ring.rank).fill_(torch.nan) for t in mine]
        fabric_of(ring).swap(mine, [plan, plan], rooms)
        return rooms

    return threads.run(len(TOKENS), main)[0]


def check_swapped(fabric_of: Callable[[threads.ThreadRing], Fabric]) -> None:
    """Check that each rank has its head of all tokens, to the bit."""
    for rank, got in enumerate(swapped(fabric_of)):
        for whole, room in zip(wholes(), got):
            assert torch.equal(room, whole[:, :, rank : rank + 1]), rank
