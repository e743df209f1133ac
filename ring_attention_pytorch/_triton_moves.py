"""Rows copied from many places to one, in one kernel: over NVLink as fast as by copy engine, with
no pause between one piece and the next."""

from collections.abc import Iterable
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 128  # are enough to fill the links
_ELEMENTS = 2048  # words of one program at a time
_WIDTH = 1024  # of a row, at most
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit
def _move_kernel(table, into, WORD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """One line of the table for each program_id(1): address, place, both strides, rows, width."""
    line = table + tl.program_id(1) * 6
    source = tl.load(line).to(tl.pointer_type(WORD))
    place = into.to(tl.pointer_type(WORD), bitcast=True) + tl.load(line + 1)
    there, here, rows, width = (
        tl.load(line + 2), tl.load(line + 3), tl.load(line + 4), tl.load(line + 5),
    )  # fmt: skip
    col = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        within = (row < rows)[:, None] & (col < width)[None, :]
        found = tl.load(source + row[:, None] * there + col[None, :], mask=within)
        tl.store(place + row[:, None] * here + col[None, :], found, mask=within)


class Moves(NamedTuple):
    """Pieces `[n, h, ...]` of memory that stays, and where they go in a tensor of one kind."""

    table: Tensor
    word: int  # bytes that are moved at once
    width: int  # words of the longest row

    @classmethod
    def of(cls, pieces: Iterable[tuple[Tensor, Tensor]], into: Tensor) -> "Moves":
        """For pairs of a piece and its place, a view into such a tensor."""
        lines = []
        for piece, place in pieces:
            size = piece.element_size()
            rows, width = piece.shape[0], piece[:1].numel() * size
            at = place.data_ptr() - into.data_ptr()
            if rows and width:
                strides = piece.stride(0) * size, place.stride(0) * size
                lines.append((piece.data_ptr(), at, *strides, rows, width))
        word = gcd(8, *(n for line in lines for n in (*line[:4], line[5])))
        lines = [(a, *(n // word for n in line), rows, w // word) for a, *line, rows, w in lines]
        table = torch.tensor(lines, dtype=torch.int64, device=into.device)
        return cls(table, word, max((line[-1] for line in lines), default=0))

    def run(self, into: Tensor) -> None:
        """Bring all pieces to where they go."""
        if not self.width:
            return
        width = min(_WIDTH, triton.next_power_of_2(self.width))
        lines = len(self.table)
        grid = triton.cdiv(_PROGRAMS, lines), lines, triton.cdiv(self.width, width)
        with torch.cuda.device_of(into):
            _move_kernel[grid](
                self.table, into, WORD=_WORDS[self.word], ROWS=_ELEMENTS // width, WIDTH=width,
                num_warps=8,
            )  # fmt: skip
