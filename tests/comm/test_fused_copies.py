"""Copies right after a barrier, in one launch: by Triton's interpreter, in processes."""

import math
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch.comm import fused_copies
from ring_attention_pytorch.comm.ulysses import HeadPartition, key_heads, land
from ring_attention_pytorch.geometry.layouts import all_segments, count
from ring_attention_pytorch.ranks.guard import Board
from tests.support.boards import CPU, PlainBuffer, do, without_clock
from tests.support.interpreter import interpreters, needs_triton
from tests.support.reference import relative_error
from tests.support.sampling import grid


def few_programs_work_beside_a_kernel(patch: pytest.MonkeyPatch) -> None:
    """On GPUs whose kernels can begin early; elsewhere nothing runs beside them."""
    table = fused_copies.Table(torch.zeros(100, 4, dtype=torch.int64), aligned=16)
    dk = torch.zeros(1, 4, 1, 8)
    board = SimpleNamespace(state=dk, rank=0, patience=0, among={}, device=dk.device)
    barrier = SimpleNamespace(board=board, purpose=0)
    calls: list[tuple[int, bool]] = []

    make = fused_copies.add_up.__wrapped__.__wrapped__
    for able in (False, True):
        patch.setattr(fused_copies, "can_begin_early", lambda device, able=able: able)
        for overlap in (False, True):
            call = make(fused_copies.FusedSum(barrier, table, True, overlap), dk, dk, dk.dtype)
            calls.append((call.programs, call.constants["EARLY"]))
    assert calls == [
        (100, False),
        (100, False),
        (100, False),
        (fused_copies._PROGRAMS_OVERLAPPING, True),
    ]


@needs_triton
def test_few_programs_work_beside_a_kernel(monkeypatch):
    few_programs_work_beside_a_kernel(monkeypatch)


pytestmark = needs_triton
RANKS, B, N, HEADS = 3, 2, 6, 2
WIDTHS = {"even": (8, 8), "odd": (3, 5)}  # of k and v: what bytes are aligned to differs
# where own tokens go, and which are where then
WRITTEN = [(slice(0, 2), slice(3, 5)), (slice(2, 5), slice(0, 3)), (slice(5, 6), slice(5, 6))]
ORDER = [2, 3, 4, 0, 1, 5]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@pytest.fixture(scope="module")
def ranks() -> Iterator[ProcessPoolExecutor]:
    with interpreters(RANKS) as pool:
        yield pool


def drawn(rank: int, d: int, dtype: torch.dtype) -> Tensor:
    """Draw a tensor that lies with heads before tokens, so that no two strides are as usual."""
    draw = torch.Generator().manual_seed(10 * rank + d)
    t = torch.randn(B, HEADS, N, d, generator=draw, dtype=torch.float64).to(dtype)
    return t.transpose(1, 2)


def both_of(rank: int, widths: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return k and v of a rank, side by side."""
    return torch.cat([drawn(rank, d + i, dtype)[..., :d] for i, d in enumerate(widths)], dim=-1)


# one program, whose line has several steps
IN_STEPS = dict(_PROGRAMS=1, _LINES=1, _ELEMENTS=32, _BLOCK=4, _WIDTH=2)
# by rank some tokens and heads of what it has written, and where they go in a room of all heads
PIECES = [
    fused_copies.Move(0, slice(0, 4), slice(1, 2), slice(0, 8, 2), slice(2, 3)),
    fused_copies.Move(1, slice(1, 5), slice(0, 2), slice(1, 8, 2), slice(0, 2)),
    fused_copies.Move(2, slice(0, 6, 2), slice(0, 1), slice(1, 6, 2), slice(2, 3)),
]


def visit(
    rank: int,
    boards: list[Tensor],
    shared: list[Tensor],
    widths: str,
    dtype: str,
    taped: bool,
    in_steps: bool = False,
) -> dict[str, Any]:
    """Write own k and v, pull some of all ranks', and add what others have of own gradients."""
    without_clock()
    with mock.patch.multiple(fused_copies, **IN_STEPS) if in_steps else nullcontext():
        return visited(rank, boards, shared, widths, dtype, taped)


def visited(
    rank: int, boards: list[Tensor], shared: list[Tensor], widths: str, dtype: str, taped: bool
) -> dict[str, Any]:
    board, of, (d, d_v) = Board(CPU, rank, boards, 20.0), DTYPES[dtype], WIDTHS[widths]
    reads = board.barrier("read")
    both = both_of(rank, (d, d_v), of)
    own = both[..., :d], both[..., d:]
    table = fused_copies.table_of_writes(PlainBuffer, *own, N, WRITTEN)
    how = fused_copies.FusedWrite(board.barrier("write"), table, waits=True)
    do(taped, fused_copies.write, how, *own, shared[rank])

    parts = [shared[0][:, 1:4], shared[2][:, :2], shared[1][:, 5:]]
    room = torch.full((B, 8, HEADS, d + d_v), torch.nan, dtype=of)
    here = [slice(5, 8), slice(0, 2), slice(2, 3)]
    table = fused_copies.table_of_copies(PlainBuffer, room, parts, here)
    do(taped, fused_copies.pull, fused_copies.FusedCopy(reads, table), room)

    taken = [torch.full((B, 8, HEADS + 1, d + d_v), torch.nan, dtype=of) for _ in range(2)]
    table = fused_copies.table_of_pieces(
        PlainBuffer, None, taken, [shared] * 2, [PIECES, PIECES[::-1]]
    )
    do(taped, fused_copies.take, fused_copies.FusedCopy(reads, table), *taken)

    peer_gradients = [
        fused_copies.PeerGradients(slice(4, 6), [shared[1][:, :2]]),
        fused_copies.PeerGradients(
            slice(0, 3), [shared[0][:, 3:], shared[2][:, 1:4], shared[1][:, 2:5]]
        ),
    ]
    totals = {}
    for fresh in (False, True):
        sums = [
            torch.full((B, N, HEADS, d), torch.nan if fresh else 1.0, dtype=of) for d in (d, d_v)
        ]
        table = fused_copies.table_of_sums(PlainBuffer, sums[0], peer_gradients)
        do(taped, fused_copies.add_up, fused_copies.FusedSum(reads, table, fresh, False), *sums, of)
        totals[fresh] = sums
    assert board.trouble() is None
    assert board.state[:3].tolist() == [0, 5, 0]  # nothing wrong, five barriers, all have left
    return dict(room=room, taken=taken, totals=totals)


def found(pool: ProcessPoolExecutor, function: Any, *given: Any, dtype: str, widths: str) -> list:
    boards = [torch.zeros(2, RANKS, dtype=torch.int64).share_memory_() for _ in range(RANKS)]
    size = B, N, HEADS, sum(WIDTHS[widths])
    shared = [torch.zeros(size, dtype=DTYPES[dtype]).share_memory_() for _ in range(RANKS)]
    futures = [
        pool.submit(function, rank, boards, shared, widths, dtype, *given) for rank in range(RANKS)
    ]
    return [future.result(timeout=900.0) for future in futures]


LAUNCHED, TAPED, STEPS = (False,), (True,), (False, True)  # in steps: not a line at once


@grid(
    "dtype, widths, how",
    [
        ("bfloat16", "even", LAUNCHED), ("bfloat16", "odd", TAPED), ("float16", "even", STEPS),
        ("float16", "odd", LAUNCHED), ("float64", "even", TAPED), ("float64", "odd", STEPS),
    ],
    always=3, drawn=2,
)  # fmt: skip
def test_ranks_write_pull_and_add(dtype, widths, how, ranks):
    of, (d, d_v) = DTYPES[dtype], WIDTHS[widths]
    all_of = [both_of(rank, (d, d_v), of)[:, ORDER] for rank in range(RANKS)]
    pulled = torch.full((B, 8, HEADS, d + d_v), torch.nan, dtype=of)
    pulled[:, 5:], pulled[:, :2], pulled[:, 2:3] = (
        all_of[0][:, 1:4], all_of[2][:, :2], all_of[1][:, 5:]
    )  # fmt: skip
    pieces = torch.full((B, 8, HEADS + 1, d + d_v), torch.nan, dtype=of)
    for rank, rows, some, to_rows, to_some in PIECES:
        pieces[:, to_rows, to_some] = all_of[rank][:, rows, some]
    wide = [t.double() for t in all_of]
    added = torch.zeros(B, N, HEADS, d + d_v, dtype=torch.float64)
    added[:, 4:6] = wide[1][:, :2]
    added[:, 0:3] = wide[0][:, 3:] + wide[2][:, 1:4] + wide[1][:, 2:5]
    for mine in found(ranks, visit, *how, dtype=dtype, widths=widths):
        for got, exact in ((mine["room"], pulled), *((t, pieces) for t in mine["taken"])):
            assert torch.equal(got.nan_to_num(9.0), exact.nan_to_num(9.0))
        for fresh, totals in mine["totals"].items():
            want = added if fresh else added + 1
            for got, exact in zip(totals, want.split([d, d_v], dim=-1)):
                assert relative_error(got, exact) < torch.finfo(of).eps


def fail(
    rank: int, boards: list[Tensor], shared: list[Tensor], widths: str, dtype: str
) -> dict[str, Any]:
    """Write, pull and add after the last rank has failed."""
    without_clock()
    board, of, (d, d_v) = Board(CPU, rank, boards, 20.0), DTYPES[dtype], WIDTHS[widths]
    if rank == RANKS - 1:
        board.fail()
        return {}
    both = both_of(rank, (d, d_v), of)
    own, written = (both[..., :d], both[..., d:]), torch.zeros_like(both)
    table = fused_copies.table_of_writes(PlainBuffer, *own, N, WRITTEN)
    fused_copies.write(
        fused_copies.FusedWrite(board.barrier("write"), table, waits=True), *own, written
    )
    room = torch.zeros(B, N, HEADS, d + d_v, dtype=of)
    table = fused_copies.table_of_copies(PlainBuffer, room, [shared[rank]], [slice(0, N)])
    fused_copies.pull(fused_copies.FusedCopy(board.barrier("read"), table), room)
    rooms, tokens, heads = [torch.zeros_like(room) for _ in range(2)], slice(0, N), slice(0, HEADS)
    pieces = [[fused_copies.Move(0, tokens, heads, tokens, heads)]] * 2
    table = fused_copies.table_of_pieces(PlainBuffer, None, rooms, [[shared[rank]]] * 2, pieces)
    fused_copies.take(fused_copies.FusedCopy(board.barrier("read"), table), *rooms)
    sums = [torch.zeros(B, N, HEADS, d, dtype=of) for d in (d, d_v)]
    table = fused_copies.table_of_sums(
        PlainBuffer, sums[0], [fused_copies.PeerGradients(slice(0, 2), [shared[rank][:, :2]])]
    )
    fused_copies.add_up(fused_copies.FusedSum(board.barrier("read"), table, True, False), *sums, of)
    return dict(read=[written, room, *rooms, *sums], trouble=board.trouble())


@pytest.mark.parametrize("widths", WIDTHS)
def test_what_is_brought_after_a_rank_has_failed_is_nan(widths, ranks):
    others = found(ranks, fail, dtype="bfloat16", widths=widths)[:-1]
    for mine in others:
        assert all(t.isnan().all() for t in mine["read"])
        assert "has failed" in mine["trouble"]  # the last rank, or the other one, which has seen it
    assert any("rank 2 has failed" in mine["trouble"] for mine in others)


STATE = dict(state="*i64", purpose="i32", rank="i32", patience="i64")
TILES = dict(RANKS=2, LANES=32, D=64, D_V=64, WIDTH=64, ROWS=64)
STRIDES = ("i32", "i32", "i32", "i32")
COMPILED = {
    "write_kernel": (
        dict(k="*bf16", v="*bf16", k_strides=STRIDES, v_strides=STRIDES, place="*bf16", n="i32",
             heads="i32", table="*i64", lines="i32"),
        dict(TILES, WAITS=True),
    ),
    "pull_kernel": (
        dict(out="*bf16", table="*i64", lines="i32"),
        dict(RANKS=2, LANES=32, WORD="int64", ALIGNED=16, BLOCK=2048),
    ),
    "take_kernel": (
        dict(outs=("*bf16", "*bf16", "*fp32"), table="*i64", lines="i32"),
        dict(RANKS=2, LANES=32, WORD="int64", ALIGNED=16, OUTS=3, WIDTH=64, ROWS=64),
    ),
    "sum_kernel": (
        dict(dk="*bf16", dv="*bf16", table="*i64", lines="i32"),
        dict(TILES, TYPE="bfloat16", WIDE="float32", ALIGNED=16, MOST=3, FRESH=False, EARLY=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_kernels_are_code_for_a_gpu(name):
    """Down to what the GPU's assembler takes, which no interpreter knows."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ring_attention_pytorch.comm import _triton_fused_copies

    kernel, (types, sizes) = getattr(_triton_fused_copies, name), COMPILED[name]
    sizes = {k: getattr(tl, size) if isinstance(size, str) else size for k, size in sizes.items()}
    types = STATE | types | dict.fromkeys(sizes, "constexpr")
    assert sorted(types) == sorted(kernel.arg_names)
    source = ASTSource(kernel, {arg: types[arg] for arg in kernel.arg_names}, sizes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=8))
    assert ".entry" in made.asm["ptx"]
    before, *after = made.asm["ptx"].split("griddepcontrol.launch_dependents")
    assert bool(after) == ("EARLY" in sizes)  # the next one may begin
    # what others have told is known by then: a kernel that fills the GPU must not wait for ranks
    assert ("acquire" in before) == (name != "sum_kernel")


class Keeping:
    """Tables that are made once for each kind, as memory that ranks share keeps them."""

    def __init__(self) -> None:
        self.tables: dict[Any, fused_copies.Table] = {}

    def table(self, kind: Any, make: Any) -> fused_copies.Table:
        return self.tables.setdefault(kind, make())


def test_a_table_is_of_one_dtype_and_of_one_length_of_samples():
    """Other tensors of the same address and size are copied and summed otherwise."""
    memory, buffer = torch.zeros(2, 8, 2, 4, dtype=torch.float64), Keeping()
    single = memory.view(torch.float32)[..., :4]
    longer = torch.as_strided(memory, (2, 4, 2, 4), (96, 8, 4, 1))
    for t in (memory[:, :4], single[:, :4], longer):
        room, total = torch.empty(2, 4, 2, 4, dtype=t.dtype), torch.empty(2, 4, 2, 2, dtype=t.dtype)
        peer_gradients = [fused_copies.PeerGradients(slice(0, 4), [t])]
        for make, *given in (
            (fused_copies.table_of_copies, room, [t], [slice(0, 4)]),
            (fused_copies.table_of_sums, total, peer_gradients),
        ):  # fmt: skip
            made, anew = make(buffer, *given), make(PlainBuffer, *given)
            assert torch.equal(made.table, anew.table)
            assert made.aligned == anew.aligned


def test_a_table_is_of_one_way_to_lie():
    """Other spans, or a room of another length, are copied and written otherwise."""
    k, buffer = torch.zeros(2, 8, 2, 4), Keeping()
    for tokens, first in ((8, 0), (8, 4), (12, 0), (12, 8)):
        here = slice(first, first + 4)
        for mine in (slice(0, 4), slice(4, 8)):
            given = k, k, tokens, [(mine, here)]
            made = fused_copies.table_of_writes(buffer, *given)
            assert torch.equal(made.table, fused_copies.table_of_writes(PlainBuffer, *given).table)
        given = torch.zeros(2, tokens, 2, 8), [k[:, :4]], [here]
        made = fused_copies.table_of_copies(buffer, *given)
        assert torch.equal(made.table, fused_copies.table_of_copies(PlainBuffer, *given).table)


def test_what_programs_do_at_a_time_is_of_all_ranks_memory():
    """They go through lines one after the other: the first of all of them, then the second."""
    n = 1 << 14
    shared = torch.zeros(4, 1, n, 2, 64)
    room, here = torch.zeros(1, 4 * n, 2, 64), [slice(i, i + n) for i in range(0, 4 * n, n)]
    table = fused_copies.table_of_copies(PlainBuffer, room, [*shared], here).table
    owners = (table[:, 0] - shared.data_ptr()) // shared[0].nbytes
    assert len(owners) == 512
    for first in range(0, 512, 128):
        assert owners[first : first + 128].bincount().tolist() == [32] * 4
    starts = table[:, 1].sort().values
    assert starts.tolist() == [*range(0, room.nbytes // 8, room.nbytes // 8 // 512)]


def test_tables_are_made_on_the_host_whatever_the_default_device():
    room = torch.zeros(1, 4, 2, 8)
    peers = fused_copies.PeerGradients(slice(0, 4), [room])
    with torch.device("meta"):
        tables = [
            fused_copies.table_of_copies(PlainBuffer, room, [room], [slice(0, 4)]),
            fused_copies.table_of_sums(PlainBuffer, room[..., :4], [peers]),
            fused_copies.table_of_writes(PlainBuffer, room, room, 4, [(slice(0, 4), slice(0, 4))]),
            fused_copies.table_of_pieces(
                PlainBuffer, None, [room], [[room]], [[fused_copies.Move(0, *[slice(0, 2)] * 4)]]
            ),
        ]
    assert all(made.table.device.type == "cpu" for made in tables)


@pytest.mark.parametrize("size", [(0, 4, 2, 8), (1, 0, 2, 8)])
def test_of_nothing_nothing_is_copied(size):
    room = torch.zeros(size, dtype=torch.bfloat16)
    table = fused_copies.table_of_copies(PlainBuffer, room, [room], [slice(0, size[1])])
    assert table.table.tolist() == [[0, 0, 0]]


def test_much_is_cut_into_lines_of_about_the_same_size():
    room = torch.zeros(1, 1 << 14, 4, 256, dtype=torch.bfloat16)
    here = [slice(0, 1 << 10), slice(1 << 10, 1 << 14)]
    table = fused_copies.table_of_copies(PlainBuffer, room, [room[:, at] for at in here], here)
    lines = table.table.tolist()
    assert 512 <= len(lines) <= 520
    assert sum(words for *_, words in lines) * 8 == room.nbytes
    assert len({start for _, start, _ in lines}) == len(lines)
    sums = fused_copies.table_of_sums(
        PlainBuffer, room, [fused_copies.PeerGradients(slice(0, 1 << 14), [room])]
    )
    assert 512 <= len(sums.table) <= 520
    assert sums.aligned == table.aligned == 16
    assert math.prod(room.shape[:3]) == sums.table[:, 1].sum()


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
    sources = [[numbers((2, *given, *more), of) for given in way.given] for of, more in kinds]
    with mock.patch.multiple(fused_copies, _PROGRAMS=6, _LINES=6, _WIDTH=4, _BLOCK=16):
        for place, moves in enumerate(way.moves):
            # a table is of places, not of tensors
            want, got, other = (
                [poisoned(way.alloc(t, place)) for t, *_ in sources] for _ in range(3)
            )
            for room, theirs in zip(want, sources):
                for m in moves:
                    room[:, m.to_rows, m.to_heads] = theirs[m.place][:, m.rows, m.heads]
            table = fused_copies.table_of_pieces(
                PlainBuffer, None, got, sources, [moves] * len(kinds)
            )
            do(taped, fused_copies.take, visit(table), *got)
            do(taped, fused_copies.take, visit(table), *other)
            for rooms in (got, other):
                if not all(map(torch.equal, want, rooms)):
                    found.append(place)
    assert board.trouble() is None
    return found


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=draw).to(dtype)
    return torch.randn(shape, generator=draw).to(dtype)


def poisoned(t: Tensor) -> Tensor:
    t.view(torch.uint8).fill_(1 if t.dtype == torch.bool else 255)
    return t


KINDS = (
    (torch.bfloat16, (16,)), (torch.half, (5,)), (torch.float32, ()), (torch.float64, (5,)),
    (torch.bool, ()),
)  # fmt: skip
WAYS = [*product((False, True), KINDS)]  # back from heads, or to them


@needs_triton
@grid(
    "layout, places, length, heads, first",
    [
        ("striped", 2, 29, (4, 2), 0), ("zigzag", 2, 29, (4, 2), 1), ("zigzag", 4, 24, (8, 2), 2),
        ("striped", 3, 13, (12, 4), 1), ("striped", 3, 2, (3, 3), 2), ("zigzag", 3, 2, (3, 3), 0),
        ("striped", 2, 0, (2, 2), 0), ("zigzag", 2, 0, (2, 2), 1),
    ],
    always=4, drawn=2,
)  # fmt: skip
def test_all_pieces_come_where_they_go(interpreted, layout, places, length, heads, first):
    """Every third of the ways; each is taken by both layouts and by several numbers of places."""
    spread = spread_over(layout, places, length, heads)
    for back, kind in WAYS[first::3]:
        taped = kind is KINDS[0]
        found = interpreted.submit(otherwise, spread, back, *kind, taped=taped).result()
        assert found == [], (back, kind)
