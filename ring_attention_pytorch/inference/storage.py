"""The storage of a cache on one rank: pools of pages, page tables, and lengths.

Host and device have the same tables and lengths, except for lengths that CUDA graphs advance.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.inference.lineage import Lineage
from ring_attention_pytorch.inference.page_table import HEADROOM, Copies, Pages, PageTable
from ring_attention_pytorch.inference.pools import Pools, Sizes
from ring_attention_pytorch.inference.rolling import RollingTokens, Windows
from ring_attention_pytorch.plan.plan_cache import PlanCache
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.scaled import SCALED, WIDE
from ring_attention_pytorch.runtime.streams import capturing

_USED = (
    "RingCache: memory must grow, and a CUDA graph uses the memory that there is; make the cache "
    "with a capacity, or `reserve` before graphs are captured"
)
_LONGEST = 80  # characters of lengths in a note


class PagedStorage:
    """This rank's pages of all sequences and layers: for `capacity` tokens each, or growing.

    A layer with a window has a circle of pages for each sequence (`rolling`).
    """

    sequences: int
    key_heads: int
    head_dim: int
    value_dim: int
    layers: int

    def __init__(
        self,
        ring: Ring,
        sizes: Sizes,
        capacity: int | None,
        page: int,
        dtype: torch.dtype,
        device: torch.device,
        windows: Windows,
        tied: bool = False,
    ) -> None:
        self.ring: Ring = ring
        self.dtype: torch.dtype = dtype
        self.device: torch.device = device
        self.sequences, self.key_heads, self.head_dim, self.value_dim, self.layers = sizes
        self.tied: bool = tied
        self.scales = int(dtype in SCALED)  # per head of a key or value
        # of queries and of new keys and values
        self.dtypes: tuple[torch.dtype, ...] = WIDE if self.scales else (dtype,)
        self.pages: Pages = Pages(page, ring.size)
        self.fixed = capacity is not None
        turns = 0 if capacity is None else self.pages.turns(capacity)
        self._table = PageTable(self.sequences, self.pages, ring.rank, self.sequences * turns)
        with torch.inference_mode(False):
            # each layer's lengths begin at a multiple of 16 bytes
            wide = -(-self.sequences // 4) * 4
            self.lengths_of: Tensor = self._ints(self.layers, wide)[:, : self.sequences]
            self.pools: Pools = self._empty(sizes, turns, windows)
        self.lineage = Lineage(self.sequences, self.layers)  # a checksum of its contents
        self._lengths = [[0] * self.sequences for _ in range(self.layers)]
        self.captured = False  # CUDA graphs hold addresses of this cache, and advance lengths
        self.has_starts = False  # `starts` were set at least once
        self.padding = 0  # the largest of `starts`
        self._reserved = 0  # every sequence has pages for this many tokens
        self.plans: PlanCache[Any] = PlanCache()  # of attention to it
        self._paged = [layer for layer, window in enumerate(windows.of) if window is None]
        each = sorted({window for window in windows.of if window is not None})
        self.circles: list[RollingTokens] = [
            RollingTokens(self.pools, windows, window) for window in each
        ]
        self._rolling = {layer: circle for circle in self.circles for layer in circle.layers}
        self._copy_to_device()
        if capacity is not None:
            self._reserve([capacity] * self.sequences)

    def _empty(self, sizes: Sizes, turns: int, windows: Windows) -> Pools:
        """Allocate `turns` pages for each sequence; circles are allocated later."""
        n, page = self.sequences, self.pages.page
        pages = [n * turns if window is None else 0 for window in windows.of]

        def each(dim: int, dtype: torch.dtype) -> list[Tensor]:
            return [self._pool(number, dim, dtype) for number in pages]

        return Pools(
            self.ring, self.device, self.dtype, sizes, self.pages, (self.key_heads * page, page),
            keys=each(self.head_dim, self.dtype),
            values=[] if self.tied else each(self.value_dim, self.dtype),
            key_scales=each(self.scales, torch.float32),
            value_scales=each(self.scales, torch.float32),
            tables=self._ints(n, turns), layer_lengths=[*self.lengths_of.unbind()],
            starts=self._ints(n), capacities=self._ints(n), overflown=self._ints(n),
            lineage=self._ints(1 + n), tied=self.tied,
        )  # fmt: skip

    # public, to read

    @property
    def starts(self) -> Tensor:
        return self.pools.starts

    @property
    def tables(self) -> Tensor:
        return self.pools.tables

    @property
    def keys(self) -> list[Tensor]:
        return self.pools.keys

    @property
    def values(self) -> list[Tensor]:
        return [self.pools.of(layer)[1] for layer in range(self.layers)]

    @property
    def key_scales(self) -> list[Tensor]:
        return self.pools.key_scales

    @property
    def value_scales(self) -> list[Tensor]:
        return self.pools.value_scales

    @property
    def capacity(self) -> int | None:
        """The most tokens of a sequence: the requested capacity in whole pages of all ranks."""
        return self.tables.shape[1] * self.pages.page * self.pages.ranks if self.fixed else None

    def memory(self, layer: int) -> Pools:
        """Return the pools of a layer: of its window, or of all layers without one."""
        circle = self._rolling.get(layer)
        return self.pools if circle is None else circle.pools

    @property
    def in_graph(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return self.device.type == "cuda" and capturing(self.device)

    def lengths_in(self, layer: int) -> list[int]:
        """Return the number of tokens of each sequence in a layer.

        Raises:
            ValueError: a CUDA graph has appended beyond the capacity.
        """
        if self.captured and not self.in_graph:
            self._lengths = self.lengths_of.tolist()
            self.lineage.count(self._lengths)
            if any(overflown := self.pools.overflown.tolist()):
                which = [i for i, over in enumerate(overflown) if over]
                self.pools.overflown.zero_()
                raise ValueError(
                    f"RingCache: a CUDA graph appended beyond the capacity of {self.capacity} "
                    f"tokens, to sequences {which}; nothing was written, and what it returned for "
                    "them is NaN; make the cache larger, or free or roll back sequences in time"
                )
        return self._lengths[layer]

    def even_lengths(self) -> list[int]:
        """Return the lengths of the sequences, the same in all layers.

        Raises:
            ValueError: layers have different lengths.
        """
        lengths = [*self.lengths_in(0)]
        if any(lengths != each for each in self._lengths):
            raise ValueError(
                f"RingCache: layers have different lengths, {self._lengths}: append to all of them "
                "first, or roll back to what all have"
            )
        return lengths

    def state_note(self, layer: int) -> str:
        """Return a layer's lengths and checksum as a readable note; "" for an unknown layer."""
        if not 0 <= layer < self.layers:
            return ""
        lengths = [*self.lengths_in(layer)]
        return f"{str(lengths)[:_LONGEST]}, {self.lineage.mark(layer):x}"

    def prepare(self, n: int, layer: int, in_graph: bool = False) -> None:
        """Allocate pages for n tokens that will be appended to each sequence of a layer.

        Raises:
            ValueError: a sequence has no room for them.
        """
        if in_graph:
            self.captured = True
            return
        lengths = self.lengths_in(layer) if self.captured else self._lengths[layer]
        longest = max(lengths) + n
        if longest <= self._reserved:
            return
        if self.capacity is not None and longest > self.capacity:
            raise ValueError(
                f"RingCache: a sequence would have {longest} tokens, more than the capacity of "
                f"{self.capacity}; nothing was appended; free or roll back sequences, or make the "
                "cache larger"
            )
        self._reserve([length + n for length in lengths])

    def check_last(self, n: int, layer: int) -> None:
        """Raise ValueError if a sequence of a layer has tokens, but fewer than n.

        On the device the output of such a sequence is NaN.
        """
        lengths = self.lengths_in(layer)
        if any(0 < length < n for length in lengths):
            raise ValueError(
                f"RingCache: {n} queries without k and v are of the last {n} tokens of each "
                f"sequence, and the cache has {lengths}: append them first, or give k and v"
            )

    def advance(self, n: int, layer: int, on_device: bool = True) -> None:
        """Add n to a layer's lengths; on the device too, unless a kernel has done so."""
        self._lengths[layer] = [length + n for length in self._lengths[layer]]
        self.lineage.advance(layer, n)
        if on_device:
            self.pools.layer_lengths[layer] += n

    def _reserve(self, tokens: Sequence[int]) -> None:
        if not (wanted := self._table.missing(tokens)):
            return
        self._grow(wanted)
        for sequence, n in enumerate(tokens):
            self._table.reserve(sequence, n)
        self._upload()

    def _begin_anew(self, lengths: Sequence[int]) -> None:
        """Drop all sequences; give each its own pages for `lengths[i]` tokens, at least as before.

        Raises:
            ValueError: CUDA graphs use memory that must grow. Then, and if memory runs out, nothing
                is dropped.
        """
        capacities = [self._table.capacity(i) for i in range(self.sequences)]
        if self.captured and any(
            length > capacity for length, capacity in zip(lengths, capacities)
        ):
            raise ValueError(_USED)
        tokens, before = [*map(max, lengths, capacities)], self._table.of
        self._table.of = [[] for _ in before]
        self._table.recount()
        try:
            self._grow(self._table.missing(tokens))
        except BaseException:
            self._table.of = before
            self._table.recount()
            raise
        for sequence, n in enumerate(tokens):
            self._table.reserve(sequence, n)
        self.lineage.begin()
        self._apply([], [0] * self.sequences)

    def _grow(self, wanted: int) -> None:
        """Enlarge the pools until `wanted` pages are free."""
        lacking = self._table.lacking(wanted)
        if not lacking:
            return
        if self.captured:
            raise ValueError(_USED)
        size = self._table.size + lacking + self._table.size // HEADROOM
        for pools in self.pools.all:
            for layer in self._paged:
                pool = pools[layer]
                larger = self._pool(size, pool.shape[-1], pool.dtype)
                larger[: len(pool)] = pool
                pools[layer] = larger
        self._table.grow(size)

    def _apply(
        self, copies: Copies, lengths: Sequence[int], starts: Sequence[int] | None = None
    ) -> None:
        """Copy pages, and set lengths and tables, in all layers."""
        if copies:
            source, target = torch.tensor(copies, device=self.device).unbind(1)
            for pools in self.pools.all:
                for layer in self._paged:
                    pools[layer][target] = pools[layer][source]
        for circle in self.circles:
            circle.shorten(lengths)
        self._lengths = [list(lengths) for _ in range(self.layers)]
        self.lengths_of.copy_(torch.tensor(self._lengths, dtype=torch.int32))
        self.lineage.count(self._lengths)
        if starts is not None:
            self._pad(starts)
        self._upload()

    def _pad(self, starts: Sequence[int]) -> None:
        """Set the padding of each sequence."""
        self.pools.starts.copy_(torch.tensor(list(starts), dtype=torch.int32))
        self.lineage.pad(starts)
        self.padding = max(starts)
        self._copy_to_device()

    def _copy_to_device(self) -> None:
        """Copy `[order, weights of sequences]`, from which kernels compute a call's number."""
        state_note = [self.lineage.order, *self.lineage.weights]
        self.pools.lineage.copy_(torch.tensor(state_note, dtype=torch.int32))

    def _upload(self) -> None:
        """Copy tables and capacities to the device, in place as long as they fit."""
        width = max(map(len, self._table.of), default=0)
        capacities = [self._table.capacity(i) for i in range(self.sequences)]
        short = [circle for circle in self.circles if circle.lacks(max(capacities))]
        wider = width > self.tables.shape[1]
        if wider or short:
            if self.captured:
                raise ValueError("RingCache: a CUDA graph uses memory that must grow")
            if wider:
                self.pools.tables = self._ints(self.sequences, width + width // HEADROOM)
            for circle in short:
                circle.grow(max(capacities))
            for circle in self.circles:
                circle.extend(self.pools)
        rows = [held + [0] * (self.tables.shape[1] - len(held)) for held in self._table.of]
        self.tables.copy_(torch.tensor(rows, dtype=torch.int32).view_as(self.tables))
        self._reserved = min(capacities)
        self.pools.capacities.copy_(torch.tensor(capacities, dtype=torch.int32))

    def _pool(self, pages: int, dim: int, dtype: torch.dtype) -> Tensor:
        shape = pages, self.key_heads, self.pages.page, dim
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=dtype, device=self.device)

    def _ints(self, *shape: int) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=torch.int32, device=self.device)
