"""Layers with a short window: each rank holds all of the last tokens of every sequence.

A sequence has a circular buffer of pages. Its table repeats the pages, and therefore lookups and
kernels need no special case:

    token     0 1 | 2 3 | 4 5 | 6 7 | 8          pages of 2, three for each sequence
    page       0     1     2     0     1         tokens 3 to 8 are in memory

Without a capacity, circles grow with the sequences up to their full size. All ranks compute the
same result and exchange nothing. A circle holds the window and 2 * `spare` tokens: `spare` to
append in one step without overwriting a visible token, and `spare` to roll back.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ring_attention_pytorch.inference.page_table import HEADROOM, Pages
from ring_attention_pytorch.inference.pools import Pools
from ring_attention_pytorch.ranks.ring import Ring


class Windows(NamedTuple):
    """For each layer the most tokens before its own that a query sees; None is all.

    >>> Windows((None, 5), spare=2).turns(5, page=4)
    3
    """

    of: tuple[int | None, ...]
    spare: int

    def check(self, layers: int) -> None:
        """Raise ValueError unless these are valid windows for `layers` layers."""
        if len(self.of) != layers:
            raise ValueError(f"windows must be those of {layers} layers, got {len(self.of)}")
        if any(window is not None and window < 0 for window in self.of):
            raise ValueError(f"windows must not be negative, got {[*self.of]}")
        if self.spare < 1:
            raise ValueError(f"spare must be at least 1, got {self.spare}")

    def turns(self, window: int, page: int) -> int:
        """Return the number of pages in a circle: of one sequence, on each rank."""
        return -(-(window + 2 * self.spare) // page)


class RollingTokens:
    """The last tokens of all layers with one window, on every rank, in the pools of `whole`."""

    def __init__(self, whole: Pools, windows: Windows, window: int) -> None:
        self.pools: Pools = replace(
            whole, ring=Ring.alone(), pages=Pages(whole.pages.page, 1),
            window=window, spare=windows.spare,
        )  # fmt: skip
        self.layers = [layer for layer, each in enumerate(windows.of) if each == window]
        self.turns = windows.turns(window, whole.pages.page)
        self.laid = 0  # allocated pages of each sequence, up to `turns`
        # longest length of each sequence since it was empty, as of the last `look`
        self.longest = [0] * whole.sizes.sequences
        self.dropped = [0] * whole.sizes.sequences  # tokens that were overwritten
        self.extend(whole)

    def extend(self, whole: Pools) -> None:
        """Rebuild the table from the allocated pages, as long as that of whole sequences."""
        width, device = whole.tables.shape[1] * whole.pages.ranks, whole.device
        with torch.inference_mode(False):
            circle = torch.arange(width, dtype=torch.int32, device=device) % max(1, self.laid)
            first = torch.arange(len(self.dropped), dtype=torch.int32, device=device) * self.laid
            self.pools.tables = first.unsqueeze(1) + circle

    def lacks(self, tokens: int) -> bool:
        """Return whether memory must grow for sequences of `tokens` tokens."""
        return self.laid < min(self.turns, self.pools.pages.turns(tokens))

    def grow(self, tokens: int) -> None:
        """Allocate each sequence's pages for `tokens` tokens, at most a full circle.

        Call `extend` afterwards to enter them in the table.
        """
        wanted, sequences = self.pools.pages.turns(tokens), len(self.dropped)
        laid, self.laid = self.laid, min(self.turns, wanted + wanted // HEADROOM)
        for pools in self.pools.all:
            for layer in self.layers:
                pool = pools[layer]
                with torch.inference_mode(False):
                    larger = pool.new_zeros(sequences * self.laid, *pool.shape[1:])
                each = larger.unflatten(0, (sequences, self.laid))
                each[:, :laid] = pool.unflatten(0, (sequences, laid))
                pools[layer] = larger

    def look(self, lengths: Sequence[Sequence[int]]) -> None:
        """Record the length of each sequence, before it changes."""
        for layer in self.layers:
            self.longest = [*map(max, self.longest, lengths[layer])]
        kept = self.turns * self.pools.pages.page
        self.dropped = [
            max(dropped, most - kept) for dropped, most in zip(self.dropped, self.longest)
        ]

    def take(self, longest: Sequence[int], oldest: Sequence[int]) -> None:
        """Set the longest lengths and the oldest stored tokens, after a state was loaded."""
        self.longest, self.dropped = [*longest], [*oldest]

    def check_rollback(self, lengths: Sequence[int]) -> None:
        """Raise ValueError if visible tokens of sequences this short have been overwritten."""
        window, spare = self.pools.window, self.pools.spare
        for i, (length, longest, dropped) in enumerate(zip(lengths, self.longest, self.dropped)):
            too_far = longest - length > spare or self.pools.begin(length) < dropped
            if length and dropped and too_far:
                raise ValueError(
                    f"RingCache: layers with a window of {window} tokens keep {spare} more, and "
                    f"sequence {i}, of which there were {longest}, would have {length}: roll back "
                    "less, or make the cache with a larger `spare`"
                )

    def shorten(self, lengths: Sequence[int]) -> None:
        """Update the records after a rollback to these lengths."""
        self.longest = [longest if n else 0 for n, longest in zip(lengths, self.longest)]
        self.dropped = [dropped if n else 0 for n, dropped in zip(lengths, self.dropped)]

    def reorder(self, beams: Sequence[int]) -> None:
        """Make sequence i continue sequence `beams[i]`."""
        self.longest = [self.longest[i] for i in beams]
        self.dropped = [self.dropped[i] for i in beams]
        for layer in self.layers:
            for pools in self.pools.all:
                pool = pools[layer]
                each = pool.unflatten(0, (len(beams), self.laid))
                each.copy_(each[torch.tensor(list(beams), device=pool.device)])
