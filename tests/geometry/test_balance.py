"""Documents dealt so that each rank has the same work."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_attention_pytorch import shard_sequence, unshard_sequence
from ring_attention_pytorch.geometry.balance import balanced, visible_keys
from ring_attention_pytorch.geometry.documents import of_borders
from ring_attention_pytorch.geometry.layouts import all_segments
from ring_attention_pytorch.geometry.segments import segment_positions
from ring_attention_pytorch.geometry.tiles import Mask, tiles, visible_pairs
from tests.support.cases import borders
from tests.support.packed import ids_of_any_kind


def lengths_of(kind: str, total: int, seed: int) -> list[int]:
    draw, found = random.Random(seed), []
    while sum(found) < total:
        if kind == "log-normal":
            found.append(max(1, int(draw.lognormvariate(8.3, 1))))
        elif kind == "one long, many short":
            found.append(total // 2 if not found else draw.randint(1, 1000))
        else:
            found.append(draw.randint(1, 60))
    draw.shuffle(found)
    return found


@pytest.mark.parametrize("kind", ["log-normal", "one long, many short", "all short"])
@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_no_rank_has_five_percent_more_work_than_the_mean(kind, size):
    for seed in range(3):
        cu = torch.tensor([0, *lengths_of(kind, size * 8192, seed)]).cumsum(0)
        n = int(cu[-1])
        for causal, window in ((True, None), (True, 1000), (False, None)):
            layout = balanced(cu, size, causal=causal, window=window)
            work = visible_keys(of_borders(cu.tolist()), causal, window)
            held = [segment_positions(s) for s in all_segments(layout, size, n)]
            assert torch.cat(held).sort().values.equal(torch.arange(n))
            loads = torch.stack([work[at].sum() for at in held])
            assert loads.max() <= 1.05 * loads.double().mean()
            tokens = [len(at) for at in held]
            assert max(tokens) <= 1.05 * n / size


@settings(deadline=None, max_examples=30)
@given(ids_of_any_kind, st.integers(1, 9), st.booleans(), st.none() | st.integers(0, 20))
def test_every_token_is_held_once_and_work_is_counted_as_the_tiles_count(ids, size, causal, window):
    row = sorted(ids[0])
    cu, n = borders(tuple(row)), len(row)
    layout = balanced(cu, size, causal=causal, window=window)
    held = all_segments(layout, size, n)
    assert sorted(p for s in held for p in segment_positions(s).tolist()) == list(range(n))
    visible = Mask(causal, window, of_borders(cu))
    work = visible_keys(visible.documents, causal, window)
    for mine in held:
        assert [s.start for s in mine] == sorted(s.start for s in mine)
        pairs = sum(visible_pairs(tiles(mine, keys, visible)) for keys in held)
        assert pairs == work[segment_positions(mine)].sum()


def test_of_one_document_it_is_even_as_zigzag_and_of_equal_ones_contiguous():
    one, equal = balanced([0, 800], 4), balanced(list(range(0, 801, 100)), 4)
    work = [sum(s.length * (2 * s.start + s.length) for s in mine) for mine in one.segments]
    assert len(set(work)) == 1
    assert max(map(len, one.segments)) == 2
    assert equal.segments == all_segments("contiguous", 4, 800)


def sharded_and_back(layout, n: int) -> bool:
    """For a pool: nothing is lost on the way."""
    x = torch.randn(2, n, 3, generator=torch.Generator().manual_seed(0))
    return torch.equal(
        unshard_sequence(shard_sequence(x, layout=layout), length=n, layout=layout), x
    )


def test_sharded_and_brought_together_again(pools):
    assert all(pools(3).run(sharded_and_back, balanced([0, 5, 6, 50, 67], 3), 67))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(cu_seqlens=[0, 4], ring_size=0), "ring_size must be at least 1"),
        (dict(cu_seqlens=[2, 4], ring_size=2), "ascend from 0"),
        (dict(cu_seqlens=[0, 4], ring_size=2, window=-1), "window must be None or at least 0"),
    ],
)
def test_balanced_says_what_can_not_be(given, said):
    with pytest.raises(ValueError, match=said):
        balanced(**given)
