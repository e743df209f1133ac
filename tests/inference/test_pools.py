"""Pools of a rank: what is written is held by its owner, and read back with its tokens."""

from itertools import chain

import pytest
import torch

from ring_attention_pytorch import RingCache
from ring_attention_pytorch.inference.page_table import Pages
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("page", [1, 2, 4])
def test_each_token_is_read_on_one_rank_and_has_its_keys(ranks: int, page: int) -> None:
    k, v = torch.randn(2, 13, 2, 4), torch.randn(2, 13, 2, 3)

    def held(ring: Ring) -> list[list[int]]:
        cache = RingCache(2, 2, 4, value_dim=3, page=page, group=ring)
        cache.append(k[:, :5], v[:, :5])
        cache.append(k[:, 5:], v[:, 5:])
        found = []
        for i in range(2):
            keys, values, tokens = cache.pools.local(i)
            assert torch.equal(keys, k[i, tokens])
            assert torch.equal(values, v[i, tokens])
            found.append(tokens.tolist())
            before = cache.pools.before(13)
            assert [before(token) for token in range(14)] == [
                sum(mine < token for mine in found[-1]) for token in range(14)
            ]
        n = len(found[0])
        both = cache.pools.local_of_all(slice(None), n, 0)
        assert torch.equal(both[0], torch.stack([k[i, found[i]] for i in range(2)]))
        assert torch.equal(both[1], torch.stack([v[i, found[i]] for i in range(2)]))
        return found

    for of_ranks in zip(*threads.run(ranks, held)[0]):
        assert sorted(chain(*of_ranks)) == [*range(13)]


def test_windows_that_are_not_kept_are_refused() -> None:
    cache = RingCache(1, 1, 4, windows=[3], spare=2, page=1, group=Ring.alone())
    pools = cache.memory(0)
    assert pools.at_once == 2
    pools.check_window(3, tokens=9, new=True)
    for window, tokens, new, why in (
        (None, 1, True, "keeps a window of 3 tokens: window must be at most that, got None"),
        (4, 1, True, "at most that, got 4"),
        (3, 3, False, "at most 2 tokens that were appended before can attend, got 3"),
    ):
        with pytest.raises(ValueError, match=why):
            pools.check_window(window, tokens, new)


@pytest.mark.parametrize(("length", "gone"), [(0, 0), (5, 0), (6, 1), (20, 15)])
def test_nobody_sees_what_is_before_the_window_and_what_is_spare(length: int, gone: int) -> None:
    cache = RingCache(1, 1, 4, windows=[3], spare=2, group=Ring.alone())
    assert cache.memory(0).begin(length) == gone
    assert cache.pools.begin(length) == 0
    assert cache.memory(0).pages == Pages(cache.pages.page, 1)
