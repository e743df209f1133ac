"""Bytes that a sharded chunk of a prompt sends and allocates on one rank; ints only."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ring_attention_pytorch.runtime.rowwise import accumulation_dtype

_WIDE = 4  # results as large as their sum in a wide dtype, and a copy of that


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
    tied: bool = False  # values are the first numbers of keys, and are not sent

    @classmethod
    def of(cls, cache: Any, heads: int, tokens: int, dtype: torch.dtype) -> "ChunkSizes":
        """Return the sizes for a cache, and queries of so many heads, and tokens on all ranks."""
        ranks = cache.ring.size
        return cls(
            ranks, cache.sequences, -(-tokens // ranks), heads, cache.key_heads, cache.head_dim,
            cache.value_dim, dtype.itemsize, accumulation_dtype(dtype).itemsize,
            copied=1 + 4 + dtype.itemsize if cache.scales else dtype.itemsize, tied=cache.tied,
        )  # fmt: skip

    @property
    def key(self) -> int:
        """Bytes of a token's key and value in a message."""
        return self.key_heads * (self.head_dim + self.value_dim * (not self.tied)) * self.itemsize

    @property
    def queries(self) -> int:
        """Bytes of one rank's queries."""
        return self.sequences * self.tokens * self.heads * self.head_dim * self.itemsize

    @property
    def keys(self) -> int:
        """Bytes of one rank's new keys and values."""
        return self.sequences * self.tokens * self.key

    @property
    def message(self) -> int:
        """Bytes of one rank's queries, keys and values."""
        return self.queries + self.keys

    @property
    def result(self) -> int:
        """Bytes of out and lse for one rank's queries."""
        rows = self.sequences * self.tokens * self.heads
        return rows * (self.value_dim * self.itemsize + self.wide)

    @property
    def sent(self) -> int:
        """Bytes that this rank sends if cached keys stay."""
        return (self.ranks - 1) * (self.message + self.result)

    def memory(self, held: int, fetched: int = 0, relayed: bool = False) -> int:
        """Return the most bytes that a call allocates, but for what a kernel needs while it runs.

        `held` counts cached tokens on this rank in whole pages, whose keys and values are copied.
        The copies are dropped before the chunk's keys are joined and put in order. If cached keys
        travel, `fetched` tokens of them arrive, and are joined, instead of queries and results.
        With `relayed` other results are merged here, too.
        """
        copied = held * self.key_heads * (self.head_dim + self.value_dim) * self.copied
        messages, results = self.ranks * self.message, 2 * (self.ranks - 1)
        if relayed:
            results = 3 * self.ranks
        if fetched:
            messages, results = self.ranks * self.keys + (held + fetched) * self.key, 1
            copied += fetched * self.key
        attending = copied + (results + 3) * self.result
        merging = 2 * self.ranks * self.keys + (results + 3 + _WIDE) * self.result
        return messages + max(attending, merging)


def keys_travel(sizes: ChunkSizes, cached: int, machines: Sequence[int]) -> bool:
    """True if over several machines `cached` tokens' keys are sent, and no queries and results.

    That depends on bytes alone, and each of these crosses to a machine once. On one machine keys
    stay: attention hides more bytes than queries have.

    >>> chunk = ChunkSizes(ranks=4, sequences=1, tokens=2048, heads=32, key_heads=8, head_dim=128,
    ...     value_dim=128, itemsize=2, wide=4, copied=2)
    >>> [keys_travel(chunk, cached, (0, 0, 1, 1)) for cached in (8192, 32768, 65536)]
    [True, True, False]
    >>> keys_travel(chunk, 8192, (0, 0, 0, 0))
    False
    """
    return any(machines) and cached * sizes.key < sizes.ranks * (sizes.queries + sizes.result)
