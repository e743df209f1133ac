"""The grid of programs for attention to a cache: ints only.

A program of `attend_kernel` computes a block of query rows (tokens, times the query heads of a
group) on a part of one key head's keys.
"""

from typing import NamedTuple

from ring_attention_pytorch.runtime.launches import power_of_2
from ring_attention_pytorch.runtime.processors import Processors

_FULL = 0.7  # this share of the programs that fit at once saturates a GPU's memory
_TURNS = 8  # programs for each multiprocessor if some are for new tokens; otherwise 2
_BLOCK = 1 << 15  # bytes of keys and values at a time: such a program fills a multiprocessor
_RESERVED = 1 << 14  # bytes of shared memory for queries and probabilities, at least
_QUERIES = 1 / 3  # of shared memory, at most
_MOST = 64  # rows of a program, at most


class Tuning(NamedTuple):
    """Measured settings: keys at a time, warps, stages, programs for each multiprocessor.

    There are twice as many programs if a block of keys and values has less than 32 KiB.
    """

    cols: int = 64
    warps: int = 4
    stages: int = 3
    programs: int = 1
    early: bool = False  # launch a kernel while the previous one runs; it waits (PDL)


class Cut(NamedTuple):
    """The programs of a call: `splits` times `blocks` for each key head of a sequence."""

    cols: int  # keys at a time
    stages: int  # blocks of keys in flight, plus one
    rows: int  # of a program's queries
    blocks: int  # of rows
    splits: int  # parts of a head's keys: of the cache, and one of new tokens

    @classmethod
    def of(
        cls,
        q: tuple[int, ...],
        keys: tuple[int, int, int],
        new: bool,
        processors: Processors,
        tuning: Tuning,
    ) -> "Cut":
        """Return the cut for queries of shape `[b, n, h, d]`.

        Args:
            q: the queries' shape.
            keys: the number of key heads, the head size of values, and the bytes of a number.
            new: the queries' own keys are passed, to be appended.
            processors: of the GPU.
            tuning: measured settings.

        >>> h100 = Processors(132, 232448)
        >>> Cut.of((1, 1, 32, 128), (8, 128, 2), True, h100, Tuning())
        Cut(cols=64, stages=3, rows=16, blocks=1, splits=17)
        >>> Cut.of((1, 64, 32, 256), (8, 256, 1), True, h100, Tuning())  # 8 bits: twice as many
        Cut(cols=32, stages=3, rows=64, blocks=4, splits=9)
        >>> Cut.of((1, 1, 128, 576), (1, 512, 2), True, h100, Tuning())  # latents
        Cut(cols=16, stages=3, rows=32, blocks=4, splits=34)
        """
        b, n, h, d = q
        heads, d_v, itemsize = keys
        widths = power_of_2(d), power_of_2(d_v)
        cols = max(16, min(tuning.cols, tuning.cols * 128 // max(widths)))
        block = cols * sum(widths) * itemsize
        in_all, row = n * h // heads, max(widths) * itemsize
        rows = min(_MOST, power_of_2(in_all))
        while rows > 16 and rows * row > _QUERIES * processors.shared:
            rows //= 2
        reserved = max(_RESERVED, rows * row)
        blocks = -(-in_all // rows)
        programs = processors.number * tuning.programs
        at_once = programs if block >= _BLOCK else 2 * programs
        return cls(
            cols=cols,
            stages=max(2, min(tuning.stages, 1 + (processors.shared - reserved) // block)),
            rows=rows,
            blocks=blocks,
            splits=splits_of(b * heads * blocks, at_once, programs * (_TURNS if new else 2)) + new,
        )


def splits_of(heads: int, at_once: int, most: int) -> int:
    """Return how many parts to split each head's keys into; each part is a program.

    All programs together are as many as run `at_once`, if that fills the GPU, otherwise about
    `most`. `heads` counts the heads of all sequences, times blocks of rows.

    >>> [splits_of(heads, 132, most=1056) for heads in (8, 128, 72, 256, 2000)]
    [16, 1, 14, 4, 1]
    >>> [splits_of(heads, 132, most=264) for heads in (8, 128, 72, 256, 2000)]
    [16, 1, 3, 1, 1]
    """
    each = at_once // heads
    if each * heads >= _FULL * at_once:
        return each
    return max(1, most // heads)
