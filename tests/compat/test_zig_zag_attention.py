"""Zigzag attention of 0.5.20, against dense attention."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from einops import rearrange
from ring_attention_pytorch.distributed import get_rank, get_world_size
from ring_attention_pytorch.ring_attention import RingAttention, apply_rotary_pos_emb
from ring_attention_pytorch.zig_zag_attention import zig_zag_attn, zig_zag_pad_seq, zig_zag_shard

from tests.support.module_cases import gradient_errors, made
from tests.support.original import Errors, attended, check, everyones
from tests.support.reference import relative_error


def zig_zag_against_dense(
    n: int, rotary: bool, var_len: bool, group: int, pad: bool, gather: bool
) -> Errors:
    """assert_zig_zag.py: a layer's projections by hand, around `zig_zag_attn`."""
    rank, size = get_rank(), get_world_size()
    options = dict(num_grouped_query_heads=group, rotary_embed=rotary, causal=True)
    attn, dense = made(RingAttention, options), made(RingAttention, options)
    inputs, cotangents = everyones(var_len, n, 12), [-t for t in everyones(var_len, n, 12)]
    cotangents = [t.roll(1, 1) for t in cotangents]
    if not gather:  # all have the same sequences, and a loss each of the same result
        inputs, cotangents = ([ts[0].clone() for _ in range(size)] for ts in (inputs, cotangents))
    angles = dense.rotary_embed(torch.arange(n)) if rotary else None
    outs = [attended(dense, x.requires_grad_(), True, angles) for x in inputs]
    torch.autograd.backward(outs, cotangents)

    mine = inputs[rank].detach().clone().requires_grad_()
    padded, remove_padding = zig_zag_pad_seq(mine) if pad else (mine, lambda t: t)
    shard, inverse = zig_zag_shard(padded, all_gather_batch=gather)
    qkv = rearrange(attn.to_qkv(shard.local_sequence), "b n (h d) -> b h n d", d=attn.dim_head)
    q, k, v = qkv.split(attn.qkv_head_breakdown, dim=-3)
    if rotary:
        at = attn.rotary_embed(shard.query_positions)
        q, k = (apply_rotary_pos_emb(at, t, head_dim_first=True) for t in (q, k))
    seen = shard.query_positions[:, None] >= shard.key_value_positions[None]
    out = attn.to_out(rearrange(zig_zag_attn(q, k, v, attn_mask=seen), "b h n d -> b n (h d)"))
    out = remove_padding(inverse(out))
    out.backward(cotangents[rank])
    dx = mine.grad
    if not gather:  # each rank's is of its own tokens, in as many losses as ranks
        dist.all_reduce(dx)
        dx /= size
    found = {"out": relative_error(out, outs[rank]), "dx": relative_error(dx, inputs[rank].grad)}
    return found | gradient_errors(attn, dense)


@pytest.mark.parametrize(
    "options",
    [
        (31, False, False, 2, True, True),
        (31, True, True, 2, True, True),
        (32, True, False, 1, True, False),
        (31, True, True, 4, False, True),  # without padding shards differ by a token
        (5, False, False, 2, False, False),
    ],
    ids=str,
)
def test_assert_zig_zag(pools: Callable, options: tuple) -> None:
    check(pools(4).run(zig_zag_against_dense, *options))
