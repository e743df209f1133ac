"""Tokens that a rank holds in pages of pools: read and written by PyTorch's operators.

Kernels read and write the same memory (`decode_plan.HeldKeys`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.comm.ring import Ring
from ring_attention_pytorch.inference.pages import Pages
from ring_attention_pytorch.inference.scaled import restored, stored


class HeldTokens:
    """Tokens of some layers in pages; which are held, and by whom, is what subclasses say."""

    ring: Ring  # those who hold different tokens
    dtype: torch.dtype
    scales: int
    device: torch.device
    sequences: int
    key_heads: int
    value_dim: int
    pages: Pages
    rows: tuple[int, int]
    step: int
    keys: list[Tensor]
    values: list[Tensor]
    key_scales: list[Tensor]
    value_scales: list[Tensor]
    tables: Tensor
    layer_lengths: list[Tensor]
    starts: Tensor
    rooms: Tensor
    overflown: Tensor
    lineage: Tensor
    plans: dict[Any, Any]  # of attention to these tokens
    given: int = 0  # lengths count
    at_once: int | None = None  # tokens that may be appended by one kernel; None is all

    def lengths_in(self, layer: int) -> list[int]:
        """Return the tokens of each sequence in a layer."""
        raise NotImplementedError

    def check_window(self, window: int | None, tokens: int, new: bool) -> None:
        """Raise ValueError if so many last tokens can't see so far back; here all can."""

    def begin(self, length: int) -> int:
        """Return how many of this rank's first tokens are gone at this length."""
        return 0

    def oldest(self, sequence: int) -> int:
        """Return how many of this rank's first tokens of a sequence were overwritten."""
        return 0

    def before(self, length: int) -> Callable[[int], int]:
        """Return how to find how many of the tokens held at this length are before a token."""
        gone = self.begin(length)
        return lambda token: max(0, self.pages.held(self.ring.rank, token) - gone)

    def pools_of(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the pools of a layer: of keys, of values, and of the scales of both."""
        k, v = self.keys[layer], self.values[layer]
        return k, v, self.key_scales[layer], self.value_scales[layer]

    def local(
        self, sequence: int, layer: int = 0, length: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys `[n, h_kv, d]`, values `[n, h_kv, d_v]` and tokens `[n]` held here.

        They are of the first `length` tokens, by default of all; in float32, if kept in 8 bits.
        """
        length = self.lengths_in(layer)[sequence] if length is None else length
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
        kept = [pool[table].transpose(1, 2).flatten(0, 1)[places] for pool in self.pools_of(layer)]
        index = torch.arange(first, n, device=self.device)
        return kept, (index // page * self.pages.ranks + self.ring.rank) * page + index % page

    def write(self, k: Tensor, v: Tensor, layer: int) -> None:
        """Write this rank's share of tokens behind the last ones; by PyTorch's operators."""
        for i, length in enumerate(self.lengths_in(layer)):
            tokens = torch.arange(length, length + k.shape[1], device=self.device)
            self.put(i, layer, tokens, k[i], v[i])

    def put(self, sequence: int, layer: int, tokens: Tensor, k: Tensor, v: Tensor) -> None:
        """Write this rank's share of tokens `[n]`, whose keys are k `[n, h_kv, d]`."""
        page, ranks = self.pages.page, self.pages.ranks
        mine = tokens // page % ranks == self.ring.rank
        tokens = tokens[mine]
        where, slot = self.tables[sequence, tokens // (page * ranks)].long(), tokens % page
        (k, key_scales), (v, value_scales) = (stored(t[mine], self.dtype) for t in (k, v))
        for pool, t in zip(self.pools_of(layer), (k, v, key_scales, value_scales)):
            pool[where, :, slot] = t
