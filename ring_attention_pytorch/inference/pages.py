"""Where each token of a cached sequence lies: pages dealt to ranks in turn.

A page is `page` consecutive tokens. Of two ranks and pages of 2 tokens:

    token      0 1 2 3 4 5 6 7 8
    rank       0 0 1 1 0 0 1 1 0
    index      0 1 0 1 2 3 2 3 4     among the tokens that the rank holds

So however long a sequence is, ranks hold equally many tokens of it, but for one page.
"""

from typing import NamedTuple

HEADROOM = 8  # what grows gets an eighth more than it must have


class Pages(NamedTuple):
    """Pages of `page` tokens over so many `ranks`."""

    page: int
    ranks: int

    def owner(self, token: int) -> int:
        """Return the rank that holds a token.

        >>> [Pages(2, 3).owner(p) for p in range(8)]
        [0, 0, 1, 1, 2, 2, 0, 0]
        """
        return token // self.page % self.ranks

    def index(self, token: int) -> int:  # type: ignore[override]  # no use for that of a tuple
        """Return the place of a token among those that its owner holds.

        >>> [Pages(2, 3).index(p) for p in range(8)]
        [0, 1, 0, 1, 0, 1, 2, 3]
        """
        return token // (self.page * self.ranks) * self.page + token % self.page

    def token(self, rank: int, index: int) -> int:
        """Return the token that a rank holds at this place: the inverse of `owner` and `index`.

        >>> [Pages(2, 3).token(1, i) for i in range(4)]
        [2, 3, 8, 9]
        """
        turn, slot = divmod(index, self.page)
        return (turn * self.ranks + rank) * self.page + slot

    def held(self, rank: int, length: int) -> int:
        """Return how many of a sequence's first `length` tokens a rank holds.

        >>> [[Pages(2, 3).held(rank, length) for rank in range(3)] for length in (3, 7)]
        [[2, 1, 0], [3, 2, 2]]
        """
        turns, rest = divmod(length, self.page * self.ranks)
        return turns * self.page + min(max(rest - rank * self.page, 0), self.page)

    def full(self, rank: int, length: int) -> int:
        """Return how many of a rank's pages are full at this length: no append will write them."""
        return self.held(rank, length) // self.page

    def turns(self, length: int) -> int:
        """Return how many pages each rank sets aside for `length` tokens, the same on all ranks.

        >>> [Pages(2, 3).turns(length) for length in (0, 1, 6, 7)]
        [0, 1, 1, 2]
        """
        return -(-length // (self.page * self.ranks))
