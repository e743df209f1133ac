"""Bytes that a sharded chunk of a prompt sends and allocates on one rank; ints only."""

from typing import NamedTuple

_NARROW = 4  # more partial results than this are summed in a wide dtype


class ChunkSizes(NamedTuple):
    """Sizes of a call with a chunk that is sharded over ranks.

    >>> chunk = ChunkSizes(ranks=2, sequences=1, tokens=4096, heads=32, key_heads=8, head_dim=128,
    ...     value_dim=128, itemsize=2, wide=4, copied=2)
    >>> chunk.message >> 20, chunk.result / 2**20, chunk.sent / 2**20
    (48, 32.5, 80.5)
    """

    ranks: int
    sequences: int
    tokens: int  # of a sequence, on one rank
    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    itemsize: int  # of queries, keys and values
    wide: int  # of lse, and of running sums
    copied: int  # bytes of a cached number while it is copied out of its page

    @property
    def message(self) -> int:
        """Bytes of one rank's queries, keys and values."""
        widths = self.heads * self.head_dim + self.key_heads * (self.head_dim + self.value_dim)
        return self.sequences * self.tokens * widths * self.itemsize

    @property
    def result(self) -> int:
        """Bytes of out and lse for one rank's queries."""
        rows = self.sequences * self.tokens * self.heads
        return rows * (self.value_dim * self.itemsize + self.wide)

    @property
    def sent(self) -> int:
        """Bytes that this rank sends, without the chunk's attention to itself."""
        return (self.ranks - 1) * (self.message + self.result)

    def memory(self, held: int) -> int:
        """Return the most bytes that a call allocates, with `held` cached tokens on this rank.

        `held` counts whole pages, whose keys and values are copied. There is a message from each
        rank; a result is sent to each other rank, and one is received from it.
        """
        copied = held * self.key_heads * (self.head_dim + self.value_dim) * self.copied
        results = 2 * self.ranks * self.result
        if self.ranks + 1 > _NARROW:  # and out in the wide dtype
            results += 2 * self.result
        return copied + self.ranks * self.message + results
