"""Pages of sequences: nobody writes what another reads, and none is lost."""

import random
from itertools import product

import pytest

from ring_attention_pytorch.inference.page_table import Pages, PageTable

SIZES = list(product((1, 2, 3, 16), (1, 2, 3, 4)))


@pytest.mark.parametrize(("page", "ranks"), SIZES)
def test_owners_and_places_are_the_same_said_otherwise(page: int, ranks: int) -> None:
    pages = Pages(page, ranks)
    for token in range(5 * page * ranks):
        assert pages.token(pages.owner(token), pages.index(token)) == token


@pytest.mark.parametrize(("page", "ranks"), SIZES)
def test_ranks_hold_what_they_own_and_all_of_it(page: int, ranks: int) -> None:
    pages = Pages(page, ranks)
    for length in range(4 * page * ranks):
        held = [pages.held(rank, length) for rank in range(ranks)]
        assert sum(held) == length
        assert max(held) - min(held) <= page
        for rank in range(ranks):
            mine = [token for token in range(length) if pages.owner(token) == rank]
            assert [pages.token(rank, i) for i in range(held[rank])] == mine
            assert pages.full(rank, length) * page <= held[rank]
            assert held[rank] <= pages.turns(length) * page


class Written:
    """A table, and what is written in its pool's pages: token by token, by sequence of origin."""

    def __init__(self, seed: int, pages: Pages, rank: int) -> None:
        self.draw, self.pages, self.rank = random.Random(seed), pages, rank
        self.table = PageTable(3, pages, rank, size=120)
        self.pool = [[None] * pages.page for _ in range(120)]
        self.wanted: list[list[int]] = [[] for _ in range(3)]  # a number for each token

    def held(self, sequence: int) -> list[int]:
        """The numbers of this rank's tokens."""
        numbers = enumerate(self.wanted[sequence])
        return [number for token, number in numbers if self.pages.owner(token) == self.rank]

    def read(self, sequence: int) -> list[int | None]:
        n = self.pages.held(self.rank, len(self.wanted[sequence]))
        places = (divmod(i, self.pages.page) for i in range(n))
        return [self.pool[self.table.of[sequence][turn]][slot] for turn, slot in places]

    def append(self, sequence: int) -> None:
        first = len(self.wanted[sequence])
        self.wanted[sequence] += [self.draw.random() for _ in range(self.draw.randint(1, 6))]
        self.table.reserve(sequence, len(self.wanted[sequence]))
        for token in range(first, len(self.wanted[sequence])):
            if self.pages.owner(token) == self.rank:
                turn, slot = divmod(self.pages.index(token), self.pages.page)
                self.pool[self.table.of[sequence][turn]][slot] = self.wanted[sequence][token]

    def shorten(self, _: int) -> None:
        lengths = [self.draw.randint(0, len(each)) for each in self.wanted]
        left = self.free_pages() - self.table.taken_to_shorten(lengths)
        for sequence, length in enumerate(lengths):
            self.copy(self.table.shorten(sequence, length))
            del self.wanted[sequence][length:]
        assert self.free_pages() == left

    def rearrange(self, _: int) -> None:
        sources = [self.draw.randrange(3) for _ in range(3)]
        lengths = [len(each) for each in self.wanted]
        left = self.free_pages() - self.table.taken_to_rearrange(sources, lengths)
        self.copy(self.table.rearrange(sources, lengths))
        self.wanted = [list(self.wanted[source]) for source in sources]
        assert self.free_pages() == left

    def free_pages(self) -> int:
        return 120 - len({page for held in self.table.of for page in held})

    def free(self, sequence: int) -> None:
        self.table.free(sequence)
        self.wanted[sequence] = []

    def copy(self, copies: list[tuple[int, int]]) -> None:
        for source, target in copies:
            self.pool[target] = list(self.pool[source])


@pytest.mark.parametrize("seed", range(20))
def test_every_sequence_reads_what_was_appended_to_it(seed: int) -> None:
    pages = Pages(page=1 + seed % 3, ranks=1 + seed % 4)
    written = Written(seed, pages, rank=seed % pages.ranks)
    for _ in range(120):
        names = ("append", "append", "append", "shorten", "rearrange", "free")
        sequence = written.draw.randrange(3)
        if len(written.wanted[sequence]) > 30:
            written.free(sequence)
        getattr(written, written.draw.choice(names))(sequence)
        for sequence in range(3):
            assert written.read(sequence) == written.held(sequence)
        used = {page for held in written.table.of for page in held}
        assert used.isdisjoint(written.table._free)
        assert len(used) + len(written.table._free) == 120


def test_full_pages_are_shared_and_others_copied() -> None:
    table = PageTable(3, Pages(4, 1), rank=0, size=12)
    table.reserve(0, tokens=10)
    assert table.rearrange([0, 0, 0], [10, 0, 0]) == [(2, 3), (2, 4)]
    assert table.of == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    assert table.shorten(1, 6) == [(1, 5)]
    assert table.of[1] == [0, 5, 3]
