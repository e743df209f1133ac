"""A rank fails, or is late, while others copy from its memory, by programs of many warps.

None keeps garbage, and gradients are there when a call has ended.

Two processes share a GPU where there is one.
"""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.comm import fused_copies
from ring_attention_pytorch.comm.fabric_kernels import OneStream
from ring_attention_pytorch.comm.symmetric_memory import allocate
from ring_attention_pytorch.ranks.guard import Board
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.uncopied import replaced

SIZE, LAST, TURNS = 2, 1, 200
ROWS, HEADS, D = 1 << 17, 4, 64  # of k and v together 128 MB: some 400 us over NVLink
MOST_CYCLES = 1_500_000  # about twice as long
RIGHT, GARBAGE = 1.0, 7.0
TOKENS, LATE = 256, 20_000_000  # cycles: some 10 ms, thousands of times what dq takes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


class Tables:
    """Tables that are made once."""

    def __init__(self) -> None:
        self.kept: dict[Any, fused_copies.Table] = {}

    def table(self, kind: Any, make: Any) -> fused_copies.Table:
        if kind not in self.kept:
            self.kept[kind] = make()
        return self.kept[kind]


def fails_at_a_random_moment(board: Board, memory: Tensor) -> None:
    """Come to the meeting, fail some time after it, and overwrite what others read."""
    board.wait_for_all("read")
    torch.cuda._sleep(random.randrange(MOST_CYCLES))
    board._fail(board.state, board.rank)  # on this stream; `fail` does not wait for it
    memory.fill_(GARBAGE)


def brought(board: Board, tables: Tables, memory: Tensor, how: str) -> list[Tensor]:
    """Copy, take or add what the other rank has; by few programs, if beside a kernel."""
    barrier = board.barrier("read")
    if how == "copied":
        room = torch.zeros_like(memory)
        table = fused_copies.table_of_copies(tables, room, [memory], [slice(0, ROWS)])
        fused_copies.pull(fused_copies.FusedCopy(barrier, table), room)
        return [room]
    if how == "taken":
        rooms, at = [torch.zeros_like(memory[:, : ROWS // 2]) for _ in range(2)], slice(0, HEADS)
        first, second = slice(0, ROWS, 2), slice(1, ROWS, 2)
        half = slice(0, ROWS // 2)
        pieces = [[fused_copies.Move(0, rows, at, half, at)] for rows in (first, second)]
        table = fused_copies.table_of_pieces(tables, "halves", rooms, [[memory]] * 2, pieces)
        fused_copies.take(fused_copies.FusedCopy(barrier, table), *rooms)
        return rooms
    sums = [memory.new_zeros(1, ROWS, HEADS, D) for _ in range(2)]
    table = fused_copies.table_of_sums(
        tables, sums[0], [fused_copies.PeerGradients(slice(0, ROWS), [memory])]
    )
    fused_copies.add_up(
        fused_copies.FusedSum(barrier, table, True, how == "added beside"), *sums, memory.dtype
    )
    return sums


def what_is_kept(how: str) -> dict[str, int]:
    """For a pool: how many turns brought garbage, and how many all, some or no numbers."""
    ring, device = Ring(), torch.device("cuda", torch.cuda.current_device())
    random.seed(0)
    state, boards, _ = allocate(dist.group.WORLD, device, (2, SIZE), torch.int64)
    shape = 1, ROWS, HEADS, 2 * D
    own, memories, _ = allocate(dist.group.WORLD, device, shape, torch.bfloat16)
    board, tables = Board(device, ring.rank, boards, 5.0), Tables()
    found = dict.fromkeys(("garbage", "all", "some", "none", "unsaid"), 0)
    for turn in range(TURNS + 1):  # the first compiles
        own.fill_(RIGHT)
        board.reset()
        board.wait()
        ring.gather_notes(f"turn {turn}", b"")
        if ring.rank == LAST and turn:
            fails_at_a_random_moment(board, own)
        else:
            got = torch.cat([t.flatten() for t in brought(board, tables, memories[LAST], how)])
            lost, right = got.isnan(), got == RIGHT
            found["garbage"] += not (lost | right).all().item()
            peers = lost.float().mean().item()
            found[{0.0: "all", 1.0: "none"}.get(peers, "some")] += 1
            found["unsaid"] += peers > 0 and "has failed" not in (board.trouble() or "")
        board.wait()
        ring.gather_notes(f"turn {turn} is over", b"")
    assert state.is_cuda
    return found


@pytest.mark.parametrize("how", ["copied", "taken", "added", "added beside"])
def test_what_was_read_while_a_rank_failed_is_right_or_nan(how, nccl):
    found, _ = nccl(SIZE).run(what_is_kept, how)
    assert found["garbage"] == found["unsaid"] == 0, found
    assert found["all"] > 1 or torch.cuda.device_count() < SIZE, found


def of_a_late_rank(late: int) -> tuple[bool, bool]:
    """Tell whether gradients are those of ranks that are in time, and whether they came beside."""
    rank, device = dist.get_rank(), torch.device("cuda", torch.cuda.current_device())
    draw = torch.Generator(device).manual_seed(rank)
    q, dout = (torch.randn(1, TOKENS, 8, 64, device=device, generator=draw) for _ in range(2))
    q, dout = q.bfloat16(), dout.bfloat16()
    mine = [t.clone().requires_grad_() for t in (q, q[:, :, :2], q[:, :, :2])]
    plan = RingPlan.make(*mine, causal=True, layout="zigzag", kernel="triton", transport="gather")
    assert isinstance(plan.transport.fabric, OneStream)

    def slow(*given: Any) -> None:
        if rank == late:
            torch.cuda._sleep(LATE)
        plan.kernel.backward(*given)

    def gradients(plan: RingPlan) -> list[Tensor]:
        grads = torch.autograd.grad(ring_attn(*mine, plan=plan), mine, dout)
        return [grad.clone() for grad in grads]  # at once, on the same stream

    want = gradients(plan)
    kernel = plan.kernel._replace(backward=slow)
    for _ in range(3):
        got = gradients(replaced(plan, kernel=kernel))
        if not all(map(torch.equal, got, want)):
            return False, plan.transport.fabric.overlap
    return True, plan.transport.fabric.overlap


@pytest.mark.parametrize("late", range(SIZE))
def test_all_gradients_are_there_when_a_call_ends(late, nccl):
    assert nccl(SIZE).run(of_a_late_rank, late) == [(True, True)] * SIZE
