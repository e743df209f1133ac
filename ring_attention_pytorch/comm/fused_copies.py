"""Kernels that wait at a barrier, then copy or add: one launch instead of three.

With few tokens each launch costs the host more than the GPU's work, and the GPU idles between
launches. One kernel therefore waits at a barrier in shared memory, copies or adds, and checks that
no rank has failed since.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import gcd, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.comm.symmetric_memory import SymmetricBuffer
from ring_attention_pytorch.ranks.guard import Barrier
from ring_attention_pytorch.runtime.launches import KernelCall, can_begin_early, operation
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype

_PROGRAMS = 128  # the most programs that wait at a barrier
# programs that add while a kernel computes, and take multiprocessors from it: on two H100 2k tokens
# take 640 and 649 us in a graph if 24 add, 648 and 650 with 16, 649 and 652 with 32, 650 and 657
# with 64; added afterwards 665 and 675
_PROGRAMS_OVERLAPPING = 24
_LEFT_FREE = 4  # multiprocessors, for work on other streams that ranks may wait for
_LINES = 4 * _PROGRAMS  # of a table, if there is much to do: then programs get equal work
# the most that a program has in flight: much, because peers' memory answers slowly. With 2048
# words and 4096 elements 8192 tokens of short documents took two H200 1446 us in place of 1391
_BLOCK = 4096  # words that it copies
_WIDTH = 64  # words of a row that it copies at once
_ELEMENTS = 16384  # that it adds, or writes


class Move(NamedTuple):
    """Some tokens and heads of a place's tensor `[b, n, h, ...]`, and where they go."""

    place: int
    rows: slice
    heads: slice
    to_rows: slice
    to_heads: slice

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(range(self.rows.start, self.rows.stop, self.rows.step or 1))


class PeerGradients(NamedTuple):
    """Gradients of some own tokens in other ranks' memory, each `[b, n, h, d + d_v]`."""

    here: slice
    parts: Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class Table:
    """The work of a kernel, int64 `[lines, ...]`, and the alignment of all of it, in bytes."""

    table: Tensor
    aligned: int

    @classmethod
    def of(
        cls, lines: Sequence[tuple[int, ...]], columns: int, aligned: int, device: torch.device
    ) -> "Table":
        """Make a table on a device without a host sync; an empty one gets a line of zeros.

        Lines are interleaved: programs that run at the same time take lines from all parts of the
        table. Otherwise all programs would read the same rank's memory at once.
        """
        lines = lines or [(0,) * columns]
        each = -(-len(lines) // _PROGRAMS)
        interleaved = [line for first in range(each) for line in lines[first::each]]
        table = torch.tensor(interleaved, dtype=torch.int64, device="cpu")
        if device.type == "cuda":
            table = table.pin_memory().to(device, non_blocking=True)
        return cls(table, aligned)


@dataclass(frozen=True)
class FusedCopy:
    """A barrier, and the table of the work that follows it."""

    barrier: Barrier
    table: Table


@dataclass(frozen=True)
class FusedWrite(FusedCopy):
    """A fused copy to own memory; it `waits` at the barrier first, or not."""

    waits: bool


@dataclass(frozen=True)
class FusedSum(FusedCopy):
    """A fused sum: it overwrites if `fresh`, or adds; with `overlap` the next kernel runs too."""

    fresh: bool
    overlap: bool


def table_of_writes(
    buffer: SymmetricBuffer, k: Tensor, v: Tensor, tokens: int, spans: Sequence[tuple[slice, slice]]
) -> Table | None:
    """Return the table that copies spans of k and v `[b, n, h, d]` to memory of `tokens` tokens.

    None where `buffer.table` has none.
    """
    key = k.shape, v.shape, tokens, *((a.start, a.stop, b.start) for a, b in spans)
    return buffer.table(key, lambda: _writes(k, v, tokens, spans))


def table_of_copies(
    buffer: SymmetricBuffer,
    out: Tensor,
    parts: Sequence[Tensor],
    here: Sequence[slice],
) -> Table | None:
    """Return the table that copies parts `[b, n, ...]` of the buffer to their places in `out`.

    None where `buffer.table` has none.
    """
    key = out.shape, *((at.start, *_memory_key(part)) for at, part in zip(here, parts))
    return buffer.table(key, lambda: _copies(out, parts, here))


def table_of_sums(
    buffer: SymmetricBuffer, like: Tensor, peer_gradients: Sequence[PeerGradients]
) -> Table | None:
    """Return the table that sums gradients into totals like this one `[b, n, h, d]`.

    Tokens without gradients get zeros. Parts lie in the buffer. None where `buffer.table` has none.
    """
    places = ((peers.here.start, *map(_memory_key, peers.parts)) for peers in peer_gradients)
    return buffer.table((like.shape, *places), lambda: _sums(like, peer_gradients))


def table_of_pieces(
    buffer: SymmetricBuffer,
    key: Hashable,
    outs: Sequence[Tensor],
    sources: Sequence[Sequence[Tensor]],
    moves: Sequence[Sequence[Move]],
) -> Table | None:
    """Return the table that copies pieces of peers' tensors to each of `outs` `[b, n, h, ...]`.

    All are contiguous. Sources lie in the buffer, and `outs` are 16-byte aligned. `key` must
    determine the moves. None where `buffer.table` has none.
    """
    return buffer.table(key, lambda: _pieces(outs, sources, moves))


def _memory_key(t: Tensor) -> tuple[Hashable, ...]:
    """Return a tensor's address, shape, strides and dtype: a table depends on nothing else."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype


def _writes(k: Tensor, v: Tensor, tokens: int, spans: Sequence[tuple[slice, slice]]) -> Table:
    (b, n, heads, _), lines = k.shape, []
    for sample in range(b):
        for mine, place in spans:
            first, to = sample * n + mine.start, sample * tokens + place.start
            lines.append((first * heads, to * heads, (mine.stop - mine.start) * heads))
    most = _most(sum(line[-1] for line in lines), _at_once(max(k.shape[-1], v.shape[-1])))
    cut = [(here + at, there + at, rows) for here, there, at, rows in _cut(lines, most)]
    return Table.of(cut, 3, 1, k.device)


def _copies(out: Tensor, parts: Sequence[Tensor], here: Sequence[slice]) -> Table:
    token = prod(out.shape[2:]) * out.element_size()
    spans = []
    for sample in range(len(out)):
        for part, place in zip(parts, here):
            to = (sample * out.shape[1] + place.start) * token
            spans.append((part[sample].data_ptr(), to, part.shape[1] * token))
    aligned = gcd(16, *(number for span in spans for number in span))
    word = min(8, aligned)
    most = _most(sum(span[-1] for span in spans), _BLOCK * word, 16)
    lines = [
        (address + at, (start + at) // word, nbytes // word)
        for address, start, at, nbytes in _cut(spans, most)
    ]
    return Table.of(lines, 3, aligned, out.device)


def _pieces(
    outs: Sequence[Tensor],
    sources: Sequence[Sequence[Tensor]],
    moves: Sequence[Sequence[Move]],
) -> Table:
    spans = [*_spans(outs, sources, moves)]
    # one word size for all: next to an lse of 1 to 3 heads, out is copied by 4 or 8 bytes at once
    aligned = 16
    for _, address, to, there, here, _, width in spans:
        aligned = gcd(aligned, address, to, there, here, width)
    word = min(8, aligned)
    narrow = []
    for number, address, to, there, here, rows, at, width in _cut(spans, _WIDTH * word):
        narrow.append((number, address + at, to + at, there, here, width, rows))
    most = _most(sum(line[-1] for line in narrow), _BLOCK // _WIDTH)
    lines = []
    for number, address, to, there, here, width, at, rows in _cut(narrow, most):
        in_words = [nbytes // word for nbytes in (to + at * here, there, here, width)]
        lines.append((number, address + at * there, *in_words, rows))
    return Table.of(lines, 7, aligned, outs[0].device)


def _spans(
    outs: Sequence[Tensor],
    sources: Sequence[Sequence[Tensor]],
    moves: Sequence[Sequence[Move]],
) -> Iterator[tuple[int, ...]]:
    """Yield each piece: index of its `out`, source, target, both row strides, rows, row width.

    All but the index and rows are in bytes.
    """
    for number, (out, theirs, some) in enumerate(zip(outs, sources, moves)):
        head, heads = prod(out.shape[3:]) * out.element_size(), out.shape[2]
        for sample, move in product(range(len(out)), some):
            place, rows, which, to, to_which = move
            t, length = theirs[place], move.length
            start = (sample * t.shape[1] + rows.start) * t.shape[2] + which.start
            to_start = (sample * out.shape[1] + to.start) * heads + to_which.start
            there, here = (rows.step or 1) * t.shape[2], (to.step or 1) * heads
            width = which.stop - which.start
            if length and width and head:
                places = t.data_ptr() + start * head, to_start * head, there * head, here * head
                yield number, *places, length, width * head


def _sums(like: Tensor, peer_gradients: Sequence[PeerGradients]) -> Table:
    heads, most, pitch, aligned = like.shape[2], 0, 0, 16
    for peers in peer_gradients:
        most = max(most, len(peers.parts))
        for part in peers.parts:
            pitch = part[0, 0, 0].nbytes  # the same in all parts
            aligned = gcd(aligned, pitch)
    spans = []
    for sample in range(len(like)):
        for here, parts in _all_of(like.shape[1], peer_gradients):
            addresses = [part[sample].data_ptr() for part in parts]
            aligned = gcd(aligned, *addresses)
            addresses += [0] * (most - len(parts))  # never read
            first = (sample * like.shape[1] + here.start) * heads
            spans.append((first, len(parts), *addresses, (here.stop - here.start) * heads))
    rows = _most(sum(span[-1] for span in spans), _at_once(like.shape[-1], most))
    lines = []
    for first, ranks, *addresses, at, length in _cut(spans, rows):
        there = [address + at * pitch for address in addresses]
        lines.append((first + at, length, ranks, *there))
    return Table.of(lines, 3 + most, aligned, like.device)


def _most(total: int, step: int, grain: int = 1) -> int:
    """Return the longest line: a multiple of `step`, or less so that every program has work.

    >>> _most(1000, 32), _most(32 * 1000, 32)
    (8, 64)
    """
    if total < _PROGRAMS * step:
        return -(-max(total, 1) // (_PROGRAMS * grain)) * grain
    return -(-total // (_LINES * step)) * step


def _cut(spans: Iterable[tuple[int, ...]], most: int) -> Iterator[tuple[int, ...]]:
    """Cut spans, whose last number is their length, into pieces of length `most` or less.

    A piece has its start in the span and its own length in place of the span's length.

    >>> [*_cut([(7, 5), (8, 0), (9, 2)], most=3)]
    [(7, 0, 3), (7, 3, 2), (9, 0, 2)]
    """
    for *span, length in spans:
        for at in range(0, length, most):
            yield *span, at, min(most, length - at)


def _all_of(length: int, peer_gradients: Sequence[PeerGradients]) -> Iterator[PeerGradients]:
    """Yield these stretches in order, and empty ones for the tokens between them.

    >>> [peers.here for peers in _all_of(9, [PeerGradients(slice(2, 4), ())])]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 9, None)]
    """
    end = 0
    for peers in sorted(peer_gradients, key=lambda peers: peers.here.start):
        if peers.here.start > end:
            yield PeerGradients(slice(end, peers.here.start), ())
        yield peers
        end = peers.here.stop
    if end < length:
        yield PeerGradients(slice(end, length), ())


@operation
def write(how: FusedWrite, k: Tensor, v: Tensor, place: Tensor) -> KernelCall:
    """Wait at the barrier, if asked to, and write k and v `[b, n, h, d]` by the table."""
    from ring_attention_pytorch.comm._triton_fused_copies import write_kernel

    table, (n, heads, d), d_v = how.table.table, k.shape[1:], v.shape[-1]
    width = max(d, d_v)
    sizes = dict(WAITS=how.waits, D=d, D_V=d_v, WIDTH=_power(width), ROWS=_at_once(width))
    args = k, v, k.stride(), v.stride(), place, n, heads, table, len(table)
    return _call(write_kernel, how.barrier, args, len(table), sizes)


@operation
def pull(fused: FusedCopy, out: Tensor) -> KernelCall:
    """Wait at the barrier, and copy to `out` by the table; NaN if a rank was out of step."""
    from ring_attention_pytorch.comm._triton_fused_copies import pull_kernel

    table = fused.table.table
    sizes = {**_words(fused.table.aligned), "BLOCK": _BLOCK}
    return _call(pull_kernel, fused.barrier, (out, table, len(table)), len(table), sizes)


@operation
def take(fused: FusedCopy, *outs: Tensor) -> KernelCall:
    """Wait at the barrier, and copy its pieces to each out; NaN if a rank was out of step."""
    from ring_attention_pytorch.comm._triton_fused_copies import take_kernel

    table = fused.table.table
    sizes = dict(OUTS=len(outs), WIDTH=_WIDTH, ROWS=_BLOCK // _WIDTH)
    sizes |= _words(fused.table.aligned)
    return _call(take_kernel, fused.barrier, (outs, table, len(table)), len(table), sizes)


@operation
def add_up(how: FusedSum, dk: Tensor, dv: Tensor, wire: torch.dtype) -> KernelCall:
    """Wait at the barrier, and add gradients to dk and dv `[b, n, h, d]` by the table.

    Gradients of dtype `wire` are summed in the accumulator's dtype, and rounded once.
    """
    import triton.language as tl

    from ring_attention_pytorch.comm._triton_fused_copies import sum_kernel

    table, aligned = how.table.table, how.table.aligned
    wide = accumulation_dtype(dk.dtype)
    of, into = (getattr(tl, str(dtype).removeprefix("torch.")) for dtype in (wire, wide))
    d, d_v = dk.shape[-1], dv.shape[-1]
    width, most = max(d, d_v), table.shape[1] - 3
    sizes = dict(
        TYPE=of, WIDE=into, ALIGNED=aligned, D=d, D_V=d_v, WIDTH=_power(width),
        ROWS=_at_once(width, most), MOST=most, FRESH=how.fresh,
        EARLY=how.overlap and can_begin_early(dk.device),
    )  # fmt: skip
    return _call(sum_kernel, how.barrier, (dk, dv, table, len(table)), len(table), sizes)


def _words(aligned: int) -> dict[str, Any]:
    """Return the word size of copies, as compile-time constants, for this alignment."""
    import triton.language as tl

    word = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}[min(8, aligned)]
    return dict(WORD=word, ALIGNED=aligned)


def _call(
    kernel: Any, barrier: Barrier, args: tuple[Any, ...], blocks: int, sizes: dict[str, Any]
) -> KernelCall:
    """Return the launch of a kernel that waits at a barrier and has this many `blocks` to do.

    An `EARLY` one has few programs, because the next kernel runs at the same time.
    """
    if sizes.get("EARLY"):
        blocks = min(blocks, _PROGRAMS_OVERLAPPING)
    board = barrier.board
    about = board.state, barrier, board.rank, board.patience
    constants = {**board.among, **sizes, "num_warps": 8}
    programs = max(1, min(_most_programs(board.device), blocks))
    return KernelCall(kernel, programs, (*about, *args), constants)


@cache
def _most_programs(device: torch.device) -> int:
    """Return how many programs may wait at a barrier: each occupies a multiprocessor."""
    if device.type != "cuda":
        return _PROGRAMS
    there = torch.cuda.get_device_properties(device).multi_processor_count
    return min(_PROGRAMS, there - _LEFT_FREE)


def _at_once(width: int, ranks: int = 1) -> int:
    """Return how many rows of a width a program has in flight, each summed over `ranks`.

    They are not fewer for more than four ranks: most lines have few.

    >>> _at_once(128), _at_once(128, 3), _at_once(128, 7)
    (128, 32, 32)
    """
    return max(1, _ELEMENTS // _power(width) // _power(min(max(ranks, 1), 4)))


def _power(number: int) -> int:
    """Return the next power of two.

    >>> [_power(n) for n in (1, 3, 64)]
    [1, 4, 64]
    """
    return 1 << (number - 1).bit_length()
