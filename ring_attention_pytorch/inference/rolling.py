"""Layers with a short window: each rank holds the last tokens of every sequence, all of them.

A sequence has some pages of its own, in a circle. The table of its pages repeats them, so whoever
looks up a token's page finds it, and kernels know nothing of circles:

    token     0 1 | 2 3 | 4 5 | 6 7 | 8          pages of 2, three for each sequence
    page       0     1     2     0     1         tokens 3 to 8 are held

Circles grow with the sequences, up to their size, where memory is not allocated at once.
All ranks compute the same, alone: nothing is exchanged. Of `spare` tokens more than the window so
many come at a time that none is overwritten that a query sees, and as many more can be forgotten.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ring_attention_pytorch.inference.page_table import HEADROOM, Pages
from ring_attention_pytorch.inference.pools import Pools
from ring_attention_pytorch.ranks.ring import Ring


class Windows(NamedTuple):
    """How many tokens before its own a query of each layer sees at most; None is all.

    >>> Windows((None, 5), spare=2).turns(5, page=4)
    3
    """

    of: tuple[int | None, ...]
    spare: int

    def check(self, layers: int) -> None:
        """Raise ValueError if so many layers can't have these windows."""
        if len(self.of) != layers:
            raise ValueError(f"windows must be those of {layers} layers, got {len(self.of)}")
        if any(window is not None and window < 0 for window in self.of):
            raise ValueError(f"windows must not be negative, got {[*self.of]}")
        if self.spare < 1:
            raise ValueError(f"spare must be at least 1, got {self.spare}")

    def turns(self, window: int, page: int) -> int:
        """Return how many pages each rank sets aside for a sequence."""
        return -(-(window + 2 * self.spare) // page)


class RollingTokens:
    """The last tokens of the layers of one window, on every rank, in pools that `whole` has."""

    def __init__(self, whole: Pools, windows: Windows, window: int) -> None:
        self.pools: Pools = replace(
            whole, ring=Ring.alone(), pages=Pages(whole.pages.page, 1),
            window=window, spare=windows.spare,
        )  # fmt: skip
        self.layers = [layer for layer, each in enumerate(windows.of) if each == window]
        self.turns = windows.turns(window, whole.pages.page)
        self.laid = 0  # of these so many have memory, for each sequence
        # how long each sequence was since it was empty, when last looked at
        self.longest = [0] * whole.sizes.sequences
        self.dropped = [0] * whole.sizes.sequences  # tokens that were overwritten
        self.extend(whole)

    def extend(self, whole: Pools) -> None:
        """Make the table anew: as long as that of whole sequences, of the pages that there are."""
        width, device = whole.tables.shape[1] * whole.pages.ranks, whole.device
        with torch.inference_mode(False):
            circle = torch.arange(width, dtype=torch.int32, device=device) % max(1, self.laid)
            first = torch.arange(len(self.dropped), dtype=torch.int32, device=device) * self.laid
            self.pools.tables = first.unsqueeze(1) + circle

    def lacks(self, tokens: int) -> bool:
        """Tell whether memory must grow for sequences of so many tokens."""
        return self.laid < min(self.turns, self.pools.pages.turns(tokens))

    def grow(self, tokens: int) -> None:
        """Give each sequence pages for so many tokens, as far as the circle goes.

        The table knows of them when it was made anew, by `extend`.
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
        """Note how long the sequences of each layer are, before that changes."""
        for layer in self.layers:
            self.longest = [*map(max, self.longest, lengths[layer])]
        kept = self.turns * self.pools.pages.page
        self.dropped = [
            max(dropped, most - kept) for dropped, most in zip(self.dropped, self.longest)
        ]

    def take(self, longest: Sequence[int], oldest: Sequence[int]) -> None:
        """Take note of sequences that were written anew: how long they were, and what is held."""
        self.longest, self.dropped = [*longest], [*oldest]

    def check_rollback(self, lengths: Sequence[int]) -> None:
        """Raise ValueError if sequences can't be so short: what they would see is overwritten."""
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
        """Take note of a rollback to these lengths."""
        self.longest = [longest if n else 0 for n, longest in zip(lengths, self.longest)]
        self.dropped = [dropped if n else 0 for n, dropped in zip(lengths, self.dropped)]

    def reorder(self, beams: Sequence[int]) -> None:
        """Let sequence i go on from sequence `beams[i]`."""
        self.longest = [self.longest[i] for i in beams]
        self.dropped = [self.dropped[i] for i in beams]
        for layer in self.layers:
            for pool in self.pools.of(layer):
                each = pool.unflatten(0, (len(beams), self.laid))
                each.copy_(each[torch.tensor(list(beams), device=pool.device)])
