"""Decoding by the name of 0.5.20, against dense attention."""

from collections.abc import Callable

import pytest
import torch
from ring_attention_pytorch.distributed import get_rank, get_world_size
from ring_attention_pytorch.tree_attn_decoding import tree_attn_decode

from tests.support.original import Errors, check
from tests.support.reference import dense_attention, relative_error


def decoded(n: int, key_heads: int) -> Errors:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn((1, *shape), generator=draw, dtype=torch.float64)
        for shape in ((8, 1, 64), (key_heads, n, 64), (key_heads, n, 64))
    )
    want = dense_attention(*(t.transpose(1, 2) for t in (q, k, v)))[0].transpose(1, 2)
    own = [t.tensor_split(get_world_size(), dim=2)[get_rank()] for t in (k, v)]
    return {
        "whole": relative_error(tree_attn_decode(q, k, v), want),
        "parts": relative_error(tree_attn_decode(q, *own, shard_kv_seq=False), want),
    }


@pytest.mark.parametrize(("n", "key_heads"), [(31, 8), (5, 2), (3, 8)])
def test_assert_tree_attn(pools: Callable, n: int, key_heads: int) -> None:
    check(pools(4).run(decoded, n, key_heads))
