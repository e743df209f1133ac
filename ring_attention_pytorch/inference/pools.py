"""The memory of keys and values that attention to a cache reads and writes: one record of it.

    RingCache           the tokens of a rank, in pages that a table finds
    a window of it      the last tokens, on every rank; the same pools (`rolling`)
    tree_attn_decode    keys that were given: a page for each sequence (`given_keys`)

PyTorch's operators read and write it here, our kernels in `_triton_attend` and `_triton_append`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.inference.page_table import Pages
from ring_attention_pytorch.inference.scaled import as_integers, restored, stored
from ring_attention_pytorch.ranks.ring import Ring


class Sizes(NamedTuple):
    """The sizes of a cache."""

    sequences: int
    key_heads: int
    head_dim: int
    value_dim: int
    layers: int


@dataclass(eq=False, repr=False)
class Pools:
    """Keys and values on this rank, and where the tokens of each layer and sequence are in them.

    Lists have an entry for each layer. A window has a ring, pages and a table of its own, and all
    else with the cache: pools that grow are replaced in the list that both have.
    """

    ring: Ring  # those who hold different tokens
    device: torch.device
    dtype: torch.dtype
    sizes: Sizes
    pages: Pages
    rows: tuple[int, int]  # between pages and between heads, in rows of keys or values
    keys: list[Tensor]  # [pages, key_heads, page, head_dim]
    values: list[Tensor]
    key_scales: list[Tensor]  # [pages, key_heads, page, 1], or 0 where there are none
    value_scales: list[Tensor]
    tables: Tensor  # int32 [sequences, pages]
    layer_lengths: list[Tensor]  # int32 [sequences]
    starts: Tensor  # int32 [sequences]: tokens before are never seen
    capacities: Tensor  # int32 [sequences]: tokens that have pages
    overflown: Tensor  # int32 [sequences]: whether a CUDA graph had no room
    lineage: Tensor  # [order, a weight for each sequence]: kernels make a call's number of it
    step: int = 1  # between tokens, in rows
    given: int = 0  # keys of each sequence, where lengths don't count
    window: int | None = None  # tokens before its own that a query sees at most; None is all
    spare: int = 0  # tokens that a window keeps beside

    @property
    def all(self) -> tuple[list[Tensor], ...]:
        """The pools of all layers: of keys, of values, and of the scales of both."""
        return self.keys, self.values, self.key_scales, self.value_scales

    @property
    def at_once(self) -> int | None:
        """How many tokens may be appended by one kernel; None is any number."""
        return None if self.window is None else self.spare

    def of(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the pools of a layer: of keys, of values, and of the scales of both."""
        k, v = self.keys[layer], self.values[layer]
        return k, v, self.key_scales[layer], self.value_scales[layer]

    def begin(self, length: int) -> int:
        """Return how many of this rank's first tokens nobody sees any more at this length."""
        return 0 if self.window is None else max(0, length - self.window - self.spare)

    def before(self, length: int) -> Callable[[int], int]:
        """Return how to find how many of the tokens held at this length are before a token."""
        gone = self.begin(length)
        return lambda token: max(0, self.pages.held(self.ring.rank, token) - gone)

    def local(
        self, sequence: int, layer: int = 0, length: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys `[n, h_kv, d]`, values `[n, h_kv, d_v]` and tokens `[n]` held here.

        They are of the first `length` tokens, by default of all; in float32, if kept in 8 bits.
        """
        length = int(self.layer_lengths[layer][sequence]) if length is None else length
        (k, v, key_scales, value_scales), tokens = self.held(sequence, layer, length)
        return restored(k, key_scales), restored(v, value_scales), tokens

    def held(
        self, sequence: int, layer: int, length: int, first: int | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """Return what is held of the first tokens, `[n, h_kv, ...]` of each pool, and tokens.

        Without those before `first` of this rank's; None is those that nobody sees any more.
        """
        n, page = self.pages.held(self.ring.rank, length), self.pages.page
        first = self.begin(length) if first is None else first
        table = self.tables[sequence, first // page : -(-n // page)].long()
        places = slice(first % page, first % page + n - first)
        kept = [pool[table].transpose(1, 2).flatten(0, 1)[places] for pool in self.of(layer)]
        index = torch.arange(first, n, device=self.device)
        return kept, (index // page * self.pages.ranks + self.ring.rank) * page + index % page

    def local_of_all(self, which: slice, held: int, layer: int) -> tuple[Tensor, Tensor]:
        """Return the first `held` keys and values here of some sequences, `[b, held, h_kv, d]`.

        They are in float32, if they are kept in 8 bits. Memory is copied by heads of pages, which
        lie in one piece: each head's tokens lie together.
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
        """Write this rank's share of tokens behind the last ones, by PyTorch's operators."""
        for i, length in enumerate(lengths):
            tokens = torch.arange(length, length + k.shape[1], device=self.device)
            self.put(i, layer, tokens, k[i], v[i])

    def put(self, sequence: int, layer: int, tokens: Tensor, k: Tensor, v: Tensor) -> None:
        """Write this rank's share of tokens `[n]`, whose keys are k `[n, h_kv, d]`."""
        page, ranks = self.pages.page, self.pages.ranks
        mine = tokens // page % ranks == self.ring.rank
        tokens = tokens[mine]
        where, slot = self.tables[sequence, tokens // (page * ranks)].long(), tokens % page
        (k, key_scales), (v, value_scales) = (stored(t[mine], self.dtype) for t in (k, v))
        for pool, t in zip(self.of(layer), (k, v, key_scales, value_scales)):
            pool[where, :, slot] = t

    def check_window(self, window: int | None, tokens: int, new: bool) -> None:
        """Raise ValueError if so many last tokens can't see so far back."""
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
