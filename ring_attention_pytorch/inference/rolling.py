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
from typing import NamedTuple
from weakref import ref

import torch

from ring_attention_pytorch.comm.ring import Ring
from ring_attention_pytorch.inference.held import HeldTokens
from ring_attention_pytorch.inference.pages import HEADROOM, Pages


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


class RollingTokens(HeldTokens):
    """The last tokens of the layers of one window, on every rank."""

    window: int
    spare: int
    longest: list[int]
    gone: list[int]

    def __init__(self, whole: HeldTokens, windows: Windows, window: int) -> None:
        self._whole, self.window, self.spare = ref(whole), window, windows.spare
        self.at_once = self.spare
        self.ring, self.pages, self.plans = Ring.alone(), Pages(whole.pages.page, 1), {}
        for name in (
            "dtype", "scales", "device", "sequences", "key_heads", "value_dim", "rows", "step",
            "keys", "values", "key_scales", "value_scales",
            "layer_lengths", "starts", "rooms", "overflown", "lineage",
        ):  # fmt: skip
            setattr(self, name, getattr(whole, name))
        self.layers = [layer for layer, each in enumerate(windows.of) if each == window]
        self.turns = windows.turns(window, self.pages.page)
        self.laid = 0  # of these so many have memory, for each sequence
        self.longest = [0] * self.sequences  # that each was since it was empty, when last looked at
        self.gone = [0] * self.sequences  # tokens that were overwritten
        self.extend()

    @property
    def whole(self) -> HeldTokens:
        """The cache that this is part of. That has this: if it had that, too, memory would stay."""
        found = self._whole()
        assert found is not None
        return found

    def extend(self) -> None:
        """Make the table anew: as long as that of whole sequences, of the pages that there are."""
        width, device = self.whole.tables.shape[1] * self.whole.pages.ranks, self.device
        with torch.inference_mode(False):
            circle = torch.arange(width, dtype=torch.int32, device=device) % max(1, self.laid)
            first = torch.arange(self.sequences, dtype=torch.int32, device=device) * self.laid
            self.tables = first.unsqueeze(1) + circle

    def lacks(self, tokens: int) -> bool:
        """Tell whether memory must grow for sequences of so many tokens."""
        return self.laid < min(self.turns, self.pages.turns(tokens))

    def grow(self, tokens: int) -> None:
        """Give each sequence pages for so many tokens, as far as the circle goes.

        The table knows of them when it was made anew, by `extend`.
        """
        wanted = self.pages.turns(tokens)
        laid, self.laid = self.laid, min(self.turns, wanted + wanted // HEADROOM)
        for pools in (self.keys, self.values, self.key_scales, self.value_scales):
            for layer in self.layers:
                pool = pools[layer]
                with torch.inference_mode(False):
                    larger = pool.new_zeros(self.sequences * self.laid, *pool.shape[1:])
                each = larger.unflatten(0, (self.sequences, self.laid))
                each[:, :laid] = pool.unflatten(0, (self.sequences, laid))
                pools[layer] = larger

    def lengths_in(self, layer: int) -> list[int]:
        return self.whole.lengths_in(layer)

    def begin(self, length: int) -> int:
        return max(0, length - self.window - self.spare)

    def look(self) -> None:
        """Note how long sequences are, before that changes."""
        for layer in self.layers:
            self.longest = [*map(max, self.longest, self.lengths_in(layer))]
        kept = self.turns * self.pages.page
        self.gone = [max(gone, most - kept) for gone, most in zip(self.gone, self.longest)]

    def oldest(self, sequence: int) -> int:
        return self.gone[sequence]

    def take(self, longest: Sequence[int], oldest: Sequence[int]) -> None:
        """Take note of sequences that were written anew: how long they were, and what is held."""
        self.longest, self.gone = [*longest], [*oldest]

    def check_rollback(self, lengths: Sequence[int]) -> None:
        """Raise ValueError if sequences can't be so short: what they would see is overwritten."""
        self.look()
        for i, (length, longest) in enumerate(zip(lengths, self.longest)):
            gone = self.gone[i]
            too_far = longest - length > self.spare or self.begin(length) < gone
            if length and gone and too_far:
                raise ValueError(
                    f"RingCache: layers with a window of {self.window} tokens keep {self.spare} "
                    f"more, and sequence {i}, of which there were {longest}, would have "
                    f"{length}: roll back less, or make the cache with a larger `spare`"
                )

    def shorten(self, lengths: Sequence[int]) -> None:
        """Take note of a rollback to these lengths."""
        self.longest = [longest if n else 0 for n, longest in zip(lengths, self.longest)]
        self.gone = [gone if n else 0 for n, gone in zip(lengths, self.gone)]

    def check_window(self, window: int | None, tokens: int, new: bool) -> None:
        """Raise ValueError if so many last tokens can't see so far back."""
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

    def reorder(self, beams: Sequence[int]) -> None:
        """Let sequence i go on from sequence `beams[i]`."""
        self.look()
        self.longest = [self.longest[i] for i in beams]
        self.gone = [self.gone[i] for i in beams]
        for layer in self.layers:
            for pool in self.pools_of(layer):
                each = pool.unflatten(0, (self.sequences, self.laid))
                each.copy_(each[torch.tensor(list(beams), device=self.device)])
