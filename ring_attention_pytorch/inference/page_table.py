"""The rank and the page of each token of a cached sequence; ints only.

Pages of `page` consecutive tokens are dealt to ranks in turn. With two ranks and pages of 2:

    token      0 1 2 3 4 5 6 7 8
    rank       0 0 1 1 0 0 1 1 0
    index      0 1 0 1 2 3 2 3 4     among the tokens that the rank holds

At any length the ranks hold equally many tokens, within one page.

Only full pages are shared between sequences, and an append never writes a shared page: pages are
copied before, when sequences are forked or shortened.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

Copies = list[tuple[int, int]]  # of pages: from, to
HEADROOM = 8  # memory grows by an eighth more than it must


class Pages(NamedTuple):
    """Pages of `page` tokens each, dealt to `ranks` ranks."""

    page: int
    ranks: int

    def owner(self, token: int) -> int:
        """Return the rank that holds a token.

        >>> [Pages(2, 3).owner(p) for p in range(8)]
        [0, 0, 1, 1, 2, 2, 0, 0]
        """
        return token // self.page % self.ranks

    def index(self, token: int) -> int:  # type: ignore[override]  # tuple.index is of no use
        """Return the place of a token among the tokens of its owner.

        >>> [Pages(2, 3).index(p) for p in range(8)]
        [0, 1, 0, 1, 0, 1, 2, 3]
        """
        return token // (self.page * self.ranks) * self.page + token % self.page

    def token(self, rank: int, index: int) -> int:
        """Return the token at this place on a rank: the inverse of `owner` and `index`.

        >>> [Pages(2, 3).token(1, i) for i in range(4)]
        [2, 3, 8, 9]
        """
        turn, slot = divmod(index, self.page)
        return (turn * self.ranks + rank) * self.page + slot

    def held(self, rank: int, length: int) -> int:
        """Return how many of the first `length` tokens a rank holds.

        >>> [[Pages(2, 3).held(rank, length) for rank in range(3)] for length in (3, 7)]
        [[2, 1, 0], [3, 2, 2]]
        """
        turns, rest = divmod(length, self.page * self.ranks)
        return turns * self.page + min(max(rest - rank * self.page, 0), self.page)

    def full(self, rank: int, length: int) -> int:
        """Return how many pages of a rank are full at this length: no append writes them."""
        return self.held(rank, length) // self.page

    def turns(self, length: int) -> int:
        """Return the number of pages that each rank allocates for `length` tokens.

        >>> [Pages(2, 3).turns(length) for length in (0, 1, 6, 7)]
        [0, 1, 1, 2]
        """
        return -(-length // (self.page * self.ranks))


class PageTable:
    """The pages of each sequence on one rank, out of a pool of `size` pages.

    >>> table = PageTable(2, Pages(2, 1), rank=0, size=6)
    >>> table.reserve(0, tokens=5)
    >>> table.rearrange([0, 0], lengths=[5, 0])
    [(2, 3)]
    >>> table.of
    [[0, 1, 2], [0, 1, 3]]
    """

    def __init__(self, sequences: int, pages: Pages, rank: int, size: int) -> None:
        self.pages: Pages = pages
        self.rank: int = rank
        self.size: int = size
        self.of: list[list[int]] = [[] for _ in range(sequences)]
        self._free = list(range(size))

    def capacity(self, sequence: int) -> int:
        """Return how many tokens of a sequence have pages, over all ranks."""
        return len(self.of[sequence]) * self.pages.page * self.pages.ranks

    def missing(self, tokens: Sequence[int]) -> int:
        """Return how many more pages the sequences need for `tokens[i]` tokens each."""
        needs = zip(tokens, self.of, strict=True)
        return sum(max(0, self.pages.turns(n) - len(held)) for n, held in needs)

    def grow(self, size: int) -> None:
        """Enlarge the pool to `size` pages; existing pages keep their places."""
        self._free += range(self.size, size)
        self.size = size

    def reserve(self, sequence: int, tokens: int) -> None:
        """Give a sequence its own pages for up to `tokens` tokens."""
        held = self.of[sequence]
        while len(held) < self.pages.turns(tokens):
            held.append(self._free.pop(0))

    def rearrange(self, sources: Sequence[int], lengths: Sequence[int]) -> Copies:
        """Make sequence i continue `sources[i]`, of length `lengths[sources[i]]`; return copies.

        Full pages are shared. The first heir of a sequence takes its other pages, the other heirs
        get as many of their own.
        """
        old, heirs, copies = self.of, set(), []
        partial: list[tuple[list[int], int]] = []  # an heir's shared pages, and its source
        found: list[list[int]] = []
        for source in sources:
            full = self.pages.full(self.rank, lengths[source])
            shared, rest = old[source][:full], old[source][full:]
            found.append([*shared, *rest] if source not in heirs else shared)
            if source in heirs and rest:
                partial.append((found[-1], source))
            heirs.add(source)
        self.of = found
        self.recount()
        for held, source in partial:
            full, there = len(held), old[source]
            held += [self._free.pop(0) for _ in there[full:]]
            if self.pages.held(self.rank, lengths[source]) > full * self.pages.page:
                copies.append((there[full], held[full]))
        return copies

    def shorten(self, sequence: int, length: int) -> Copies:
        """Give a sequence its own pages from token `length` on; return pages to copy."""
        held, users, copies = self.of[sequence], self._users(), []
        full = self.pages.full(self.rank, length)
        partial = self.pages.held(self.rank, length) > full * self.pages.page
        for place in range(full, len(held)):
            if users[page := held[place]] > 1:
                held[place] = self._free.pop(0)
                if place == full and partial:
                    copies.append((page, held[place]))
        return copies

    def taken_to_rearrange(self, sources: Sequence[int], lengths: Sequence[int]) -> int:
        """Return how many free pages `rearrange` takes, minus the pages that it frees.

        >>> table = PageTable(2, Pages(2, 1), rank=0, size=4)
        >>> for sequence in range(2):
        ...     table.reserve(sequence, tokens=4)
        >>> [table.taken_to_rearrange(sources, [3, 3]) for sources in ([1, 0], [0, 0])]
        [0, -1]
        """
        again = (Counter(sources) - Counter(set(sources))).elements()
        copied = sum(len(self._open_pages(source, lengths[source])) for source in again)
        kept = {page for source in sources for page in self.of[source]}
        return copied - (self.size - len(self._free) - len(kept))

    def taken_to_shorten(self, lengths: Sequence[int]) -> int:
        """Return how many free pages are needed to shorten all sequences to these lengths.

        The last user of a shared page keeps it; each other one that will write it needs a copy.
        """
        users = self._users()
        open_pages = (self._open_pages(i, length) for i, length in enumerate(lengths))
        writers = Counter(page for pages in open_pages for page in pages)
        return sum(min(number, users[page] - 1) for page, number in writers.items())

    def lacking(self, wanted: int) -> int:
        """Return how many of `wanted` pages the pool lacks."""
        return max(0, wanted - len(self._free))

    def _open_pages(self, sequence: int, length: int) -> list[int]:
        """Return the pages of a sequence that are not full at this length."""
        return self.of[sequence][self.pages.full(self.rank, length) :]

    def free(self, sequence: int) -> None:
        """Take away all pages of a sequence."""
        self.of[sequence] = []
        self.recount()

    def _users(self) -> list[int]:
        users = [0] * self.size
        for held in self.of:
            for page in held:
                users[page] += 1
        return users

    def recount(self) -> None:
        """Recompute the list of free pages."""
        self._free = [page for page, users in enumerate(self._users()) if not users]
