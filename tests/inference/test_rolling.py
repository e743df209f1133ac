"""Layers with a window keep their last tokens, and nothing else."""

import pytest
import torch

from ring_attention_pytorch.inference.attention import ring_attn_with_cache
from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.ranks.ring import Ring


def test_a_layer_with_a_window_keeps_no_more() -> None:
    cache = RingCache(1, 1, 4, layers=2, windows=[None, 3], spare=2, page=1, group=Ring.alone())
    k = torch.ones(1, 20, 1, 4)
    for layer in range(2):
        cache.append(k, k, layer)
    q = k[:, :3]
    for refused, why in {
        lambda: ring_attn_with_cache(q, q, q, cache, layer=1): "keeps a window of 3 tokens",
        lambda: ring_attn_with_cache(q, q, q, cache, layer=1, window=4): "must be at most that",
        lambda: ring_attn_with_cache(q, q, q, cache, layer=1, window=4, layout="zigzag"): "keeps a",
        lambda: ring_attn_with_cache(q, None, None, cache, layer=1, window=3): "at most 2 tokens",
        lambda: cache.rollback(3): "keep 2 more, and sequence 0, of which there were 20",
        lambda: RingCache(1, 1, 4, windows=[3, 3], group=cache.ring): "those of 1 layers, got 2",
        lambda: RingCache(1, 1, 4, windows=[-1], group=cache.ring): "must not be negative",
        lambda: RingCache(1, 1, 4, windows=[1], spare=0, group=cache.ring): "at least 1, got 0",
    }.items():
        with pytest.raises(ValueError, match=why):
            refused()
        assert cache.lengths_of.tolist() == [[20], [20]]
    cache.rollback(2)
    assert cache.memory(1).local(0, 1)[2].tolist() == [13, 14, 15, 16, 17]
    assert sum(pool.nbytes for pool in cache.pools.of(1)) == (3 + 2 * 2) * 2 * 4 * 4
    whole = RingCache(1, 1, 4, layers=2, group=Ring.alone())
    for layer in range(2):
        whole.append(k, k, layer)
    with pytest.raises(ValueError, match="the states hold 5 of the 18 tokens"):
        whole.load_state_dict(cache.state_dict())
    cache.load_state_dict(whole.state_dict())
    assert cache.lengths == [20]
