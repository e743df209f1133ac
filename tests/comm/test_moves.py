"""Pieces moved by one kernel, and summed, through Triton's interpreter, against PyTorch."""

from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch.comm import fused_copies
from ring_attention_pytorch.comm.ulysses import HeadPartition, key_heads, land
from ring_attention_pytorch.geometry.layouts import all_segments, count
from ring_attention_pytorch.ranks.guard import Board
from tests.comm.test_fused_copies import Shelf, do
from tests.ranks.test_guard import CPU, without_clock
from tests.support.interpreter import needs_triton
from tests.support.kernel_cases import far


def spread_over(layout: str, places: int, length: int, heads: tuple[int, int]) -> HeadPartition:
    shards = all_segments(layout, places, length)
    lengths = tuple(map(count, shards))
    return HeadPartition(lengths, max(lengths), land(shards)[1], key_heads(*heads, places))


def otherwise(
    spread: HeadPartition, back: bool, dtype: torch.dtype, rest: tuple[int, ...], taped: bool
) -> list[int]:
    """The places at which something else comes than what copies bring."""
    without_clock()
    board = Board(CPU, 0, [torch.zeros(2, 1, dtype=torch.int64)], 20.0)
    visit, found = partial(fused_copies.FusedCopy, board.barrier("read")), []
    way = spread.to_sequence if back else spread.to_heads
    kinds = (dtype, rest), (torch.float32, ()), (dtype, (1, *rest))
    sources = [[drawn((2, *given, *more), of) for given in way.given] for of, more in kinds]
    with mock.patch.multiple(fused_copies, _PROGRAMS=6, _LINES=6, _WIDTH=4, _BLOCK=16):
        for place, moves in enumerate(way.moves):
            # a table is of places, not of tensors
            want, got, other = (
                [poisoned(way.room(t, place)) for t, *_ in sources] for _ in range(3)
            )
            for room, theirs in zip(want, sources):
                for m in moves:
                    room[:, m.to_rows, m.to_heads] = theirs[m.place][:, m.rows, m.heads]
            table = fused_copies.table_of_pieces(Shelf, None, got, sources, [moves] * len(kinds))
            do(taped, fused_copies.take, visit(table), *got)
            do(taped, fused_copies.take, visit(table), *other)
            for rooms in (got, other):
                if not all(map(torch.equal, want, rooms)):
                    found.append(place)
    assert board.trouble() is None
    return found


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=draw).to(dtype)
    return torch.randn(shape, generator=draw).to(dtype)


def poisoned(t: Tensor) -> Tensor:
    t.view(torch.uint8).fill_(1 if t.dtype == torch.bool else 255)
    return t


@needs_triton
@pytest.mark.parametrize(
    ("layout", "places", "length", "heads"),
    [
        ("striped", 2, 29, (4, 2)), ("zigzag", 2, 29, (4, 2)), ("zigzag", 4, 24, (8, 2)),
        ("striped", 3, 13, (12, 4)), ("striped", 3, 2, (3, 3)), ("zigzag", 3, 2, (3, 3)),
        ("striped", 2, 0, (2, 2)), ("zigzag", 2, 0, (2, 2)),
    ],
)  # fmt: skip
def test_all_pieces_come_where_they_go(interpreted, layout, places, length, heads):
    spread = spread_over(layout, places, length, heads)
    kinds = (
        (torch.bfloat16, (16,)), (torch.half, (5,)), (torch.float32, ()), (torch.float64, (5,)),
        (torch.bool, ()),
    )  # fmt: skip
    for back, (number, kind) in product((False, True), enumerate(kinds)):
        found = interpreted.submit(otherwise, spread, back, *kind, taped=number == 0).result()
        assert found == [], (back, kind)


def wrong_sums(dtype: torch.dtype) -> list[tuple]:
    """Of parts that lie in several ways, in several dtypes: those that are not rounded once."""
    from ring_attention_pytorch.runtime import _triton_rowwise

    _triton_rowwise._ELEMENTS = 32  # so that heads of some are one row, of others not
    draw, found = torch.Generator().manual_seed(0), []
    for n, number, fresh, heads in product((0, 1, 7), (1, 9, 17), (False, True), (3, 7)):
        for alike in (True, False):
            several = [torch.randn(2, n + 3, heads, 6, generator=draw) for _ in range(number + 1)]
            parts = [t[:, 1 : n + 1].to(dtype) for t in several]
            if not alike:
                parts[::3] = [t[:, 1 : n + 1] for t in several[::3]]
                parts[1::3] = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in parts[1::3]]
            total = parts.pop().float()
            want = sum((part.double() for part in parts), total.double() * (not fresh))
            _triton_rowwise.fused_add_(total, *parts, fresh=fresh)
            if not torch.allclose(total.double(), want, atol=1e-5):
                found.append((n, number, fresh, heads, alike))
    return found


def wrong_far_away(dim: int) -> list[str]:
    """Of the passes over rows, those that go wrong where indices times strides pass 32 bits."""
    from ring_attention_pytorch.runtime import _triton_rowwise

    draw = torch.Generator().manual_seed(0)
    x, y, z = (torch.randn(1, 5, 3, 6, generator=draw).half() for _ in range(3))
    lse, lse_x = (torch.randn(1, 3, 5, generator=draw) for _ in range(2))
    at = far(x, dim)
    total, merged = z.clone(), z.float()
    _triton_rowwise.fused_add_(total, at, y, fresh=False)
    _triton_rowwise.fused_merge_(merged, new := lse.clone(), at, far(lse_x, (0, 2, 1, 1)[dim]))
    weight = torch.sigmoid(lse_x - lse).transpose(1, 2).unsqueeze(-1)
    results = {
        "add_": (total, z + x + y),
        "merge_": (merged, z.float().lerp(x.float(), weight)),
        "merge_'s lse": (new, torch.logaddexp(lse, lse_x)),
        "sum_of_products": (
            _triton_rowwise.fused_sum_of_products(y, at),
            (x.float() * y.float()).sum(-1).transpose(1, 2),
        ),
    }
    return [name for name, (got, want) in results.items() if not got.allclose(want, atol=2e-3)]


@needs_triton
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_passes_over_rows_reach_beyond_32_bits(interpreted, dim):
    assert interpreted.submit(wrong_far_away, dim).result() == []


@needs_triton
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.thorough)]
)
def test_parts_are_summed_however_they_lie(interpreted, dtype):
    assert interpreted.submit(wrong_sums, dtype).result() == []
