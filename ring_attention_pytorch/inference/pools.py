"""The record of memory for keys and values that attention to a cache reads and writes.

    RingCache           this rank's tokens, in pages listed in a table
    a window of it      the last tokens, on every rank, in the same pools (`rolling`)
    tree_attn_decode    given keys: a page for each sequence (`given_keys`)

PyTorch's operators use it here, the Triton kernels in `_triton_attend` and `_triton_append`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.inference.page_table import Pages
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.scaled import as_integers, restored, stored


class Sizes(NamedTuple):
    """The sizes of a cache."""

    sequences: int
    key_heads: int
    head_dim: int
    value_dim: int
    layers: int


@dataclass(eq=False, repr=False)
class Pools:
    """Keys and values on this rank, and the places of each layer's and sequence's tokens.

    Lists have an entry for each layer. A window has its own ring, pages and table, and shares all
    other fields with the cache: pools that grow are replaced in the shared lists.
    """

    ring: Ring  # the ranks that hold different tokens
    device: torch.device
    dtype: torch.dtype
    sizes: Sizes
    pages: Pages
    rows: tuple[int, int]  # between pages and between heads, in rows of keys or values
    keys: list[Tensor]  # [pages, key_heads, page, head_dim]
    values: list[Tensor]
    key_scales: list[Tensor]  # [pages, key_heads, page, 1], or 0 without scales
    value_scales: list[Tensor]
    tables: Tensor  # int32 [sequences, pages]
    layer_lengths: list[Tensor]  # int32 [sequences]
    starts: Tensor  # int32 [sequences]: tokens before are never seen
    capacities: Tensor  # int32 [sequences]: the most tokens, by their pages
    overflown: Tensor  # int32 [sequences]: whether a CUDA graph had no room
    lineage: Tensor  # [order, weights of sequences]: kernels compute a call's number from it
    step: int = 1  # between tokens, in rows
    given: int = 0  # keys of each sequence, instead of lengths
    window: int | None = None  # the most tokens before its own that a query sees; None is all
    spare: int = 0  # tokens that are kept beyond a window
    tied: bool = False  # values are the first numbers of keys, and `values` has no memory

    @property
    def all(self) -> tuple[list[Tensor], ...]:
        """The pools of all layers that have memory: of keys, values, and the scales of both."""
        values = () if self.tied else (self.values,)
        return self.keys, *values, self.key_scales, self.value_scales

    @property
    def at_once(self) -> int | None:
        """The most tokens that one kernel can append; None is any number."""
        return None if self.window is None else self.spare

    def of(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the pools of a layer: of keys, of values, and of the scales of both."""
        k = self.keys[layer]
        v = k[..., : self.sizes.value_dim] if self.tied else self.values[layer]
        return k, v, self.key_scales[layer], self.value_scales[layer]

    def begin(self, length: int) -> int:
        """Return how many of this rank's first tokens are out of every query's window."""
        return 0 if self.window is None else max(0, length - self.window - self.spare)

    def before(self, length: int) -> Callable[[int], int]:
        """Return a function that counts the tokens before a token, of those held at a length."""
        gone = self.begin(length)
        return lambda token: max(0, self.pages.held(self.ring.rank, token) - gone)

    def local(
        self, sequence: int, layer: int = 0, length: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's keys `[n, h_kv, d]`, values `[n, h_kv, d_v]` and tokens `[n]`.

        Only of the first `length` tokens; None is all. Float32 if the cache has 8 bits.
        """
        length = int(self.layer_lengths[layer][sequence]) if length is None else length
        (k, v, key_scales, value_scales), tokens = self.held(sequence, layer, length)
        return restored(k, key_scales), restored(v, value_scales), tokens

    def held(
        self, sequence: int, layer: int, length: int, first: int | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """Return this rank's part of the first `length` tokens: rows of each pool, and tokens.

        Rows are `[n, h_kv, ...]`, from this rank's token number `first` on. None skips the tokens
        that no query sees any more.
        """
        n, page = self.pages.held(self.ring.rank, length), self.pages.page
        first = self.begin(length) if first is None else first
        table = self.tables[sequence, first // page : -(-n // page)].long()
        places = slice(first % page, first % page + n - first)
        kept = [pool[table].transpose(1, 2).flatten(0, 1)[places] for pool in self.of(layer)]
        index = torch.arange(first, n, device=self.device)
        return kept, (index // page * self.pages.ranks + self.ring.rank) * page + index % page

    def local_of_all(self, which: slice, held: int, layer: int) -> tuple[Tensor, Tensor]:
        """Return this rank's first `held` keys and values of sequences, `[b, held, h_kv, d]`.

        Float32 if the cache has 8 bits. Copies one head of a page at a time, whose tokens are
        contiguous.
        """
        tables, key_heads = self.tables[which, : -(-held // self.pages.page)], self.sizes.key_heads
        heads = torch.arange(key_heads, device=self.device).unsqueeze(1)
        where = torch.add(heads, tables.unsqueeze(1), alpha=key_heads)  # [b, h_kv, pages]
        b, h, pages = where.shape
        found = []
        for pool in map(as_integers, self.of(layer)):
            copied = pool.flatten(0, 1).index_select(0, where.flatten())
            copied = copied.view(b, h, pages * self.pages.page, pool.shape[-1])
            found.append(copied[:, :, :held].transpose(1, 2))
        k, v, key_scales, value_scales = found
        return restored(k, key_scales), restored(v, value_scales)

    def write(self, k: Tensor, v: Tensor, layer: int, lengths: Sequence[int]) -> None:
        """Write this rank's share of new tokens after the last ones, with PyTorch's operators."""
        for i, length in enumerate(lengths):
            tokens = torch.arange(length, length + k.shape[1], device=self.device)
            self.put(i, layer, tokens, k[i], v[i])

    @torch.no_grad()
    def put(self, sequence: int, layer: int, tokens: Tensor, k: Tensor, v: Tensor) -> None:
        """Write this rank's share of tokens `[n]`; k is `[n, h_kv, d]`, v `[n, h_kv, d_v]`."""
        page, ranks = self.pages.page, self.pages.ranks
        mine = tokens // page % ranks == self.ring.rank
        tokens = tokens[mine]
        where, slot = self.tables[sequence, tokens // (page * ranks)].long(), tokens % page
        (k, key_scales), (v, value_scales) = (stored(t[mine], self.dtype) for t in (k, v))
        for pool, t in zip(self.of(layer), (k, v, key_scales, value_scales)):
            pool[where, :, slot] = t

    def check_window(self, window: int | None, tokens: int, new: bool) -> None:
        """Raise ValueError if the last `tokens` tokens can't see `window` tokens back."""
        if self.window is None:
            return
        if window is None or window > self.window:
            raise ValueError(
                f"this layer keeps a window of {self.window} tokens: window must be at most that, "
                f"got {window}"
            )
        if not new and tokens > self.spare:
            raise ValueError(
                f"of a layer with a window at most {self.spare} tokens that were appended before "
                f"can attend, got {tokens}: give their k and v, or make `spare` larger"
            )
