"""Where tokens lie, in numbers."""

from itertools import product

import pytest

from ring_attention_pytorch.inference.page_table import Pages

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
