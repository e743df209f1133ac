"""Which pages of a rank's pool hold which sequence: ints only, no tensors.

A page may serve several sequences only while it is full. So an append never writes a shared page:
pages are copied before that, where sequences are forked or shortened.
"""

from collections.abc import Sequence

from ring_attention_pytorch.inference.pages import Pages

Copies = list[tuple[int, int]]  # of pages: from, to


class PageTable:
    """The pages of each sequence on one rank, of a pool of `size`.

    >>> table = PageTable(2, Pages(2, 1), rank=0, size=6)
    >>> table.reserve(0, tokens=5)
    >>> table.rearrange([0, 0], lengths=[5, 0])
    [(2, 3)]
    >>> table.of
    [[0, 1, 2], [0, 1, 3]]
    """

    pages: Pages
    rank: int
    size: int

    def __init__(self, sequences: int, pages: Pages, rank: int, size: int) -> None:
        self.pages, self.rank, self.size = pages, rank, size
        self.of: list[list[int]] = [[] for _ in range(sequences)]
        self._free = list(range(size))

    def room(self, sequence: int) -> int:
        """Return how many tokens of a sequence have pages, on all ranks."""
        return len(self.of[sequence]) * self.pages.page * self.pages.ranks

    def missing(self, tokens: Sequence[int]) -> int:
        """Return how many more pages sequences need to be that long."""
        needs = zip(tokens, self.of, strict=True)
        return sum(max(0, self.pages.turns(n) - len(held)) for n, held in needs)

    def grow(self, size: int) -> None:
        """Use a pool of that size, with all pages there are at their places."""
        self._free += range(self.size, size)
        self.size = size

    def reserve(self, sequence: int, tokens: int) -> None:
        """Give a sequence pages of its own for up to so many tokens."""
        held = self.of[sequence]
        while len(held) < self.pages.turns(tokens):
            held.append(self._free.pop(0))

    def rearrange(self, sources: Sequence[int], lengths: Sequence[int]) -> Copies:
        """Let each sequence go on from another, or itself, of this length; return pages to copy.

        Full pages are shared. The first that goes on from a sequence takes its other pages, the
        rest get as many of their own.
        """
        old, heirs, copies = self.of, set(), []
        partial: list[tuple[list[int], int]] = []  # pages to go on with, and what is in the first
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
        """Make pages that tokens from `length` on would write its own; return pages to copy."""
        held, users, copies = self.of[sequence], self._users(), []
        full = self.pages.full(self.rank, length)
        partial = self.pages.held(self.rank, length) > full * self.pages.page
        for place in range(full, len(held)):
            if users[page := held[place]] > 1:
                held[place] = self._free.pop(0)
                if place == full and partial:
                    copies.append((page, held[place]))
        return copies

    def lacking(self, wanted: int) -> int:
        """Return by how many pages the pool is short of so many more."""
        return max(0, wanted - len(self._free))

    def open_pages(self, sequence: int, length: int) -> int:
        """Return how many of a sequence's pages are not full at this length."""
        return len(self.of[sequence]) - self.pages.full(self.rank, length)

    def free(self, sequence: int) -> None:
        """Take all pages of a sequence."""
        self.of[sequence] = []
        self.recount()

    def _users(self) -> list[int]:
        users = [0] * self.size
        for held in self.of:
            for page in held:
                users[page] += 1
        return users

    def recount(self) -> None:
        """Find anew which pages are free."""
        self._free = [page for page, users in enumerate(self._users()) if not users]
