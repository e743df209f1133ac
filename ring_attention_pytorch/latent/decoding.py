"""Decoding with a cache of latents, spread over ranks: attention in the latents' space.

Nothing is expanded. The up-projection of keys is applied to the query, and the one of values to the
result: one key head of `rank + d_rope` numbers serves all heads, with values of `rank` numbers.

DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.2 (absorbed matrices).
"""

from functools import partial

import torch
from einops import einsum, rearrange
from torch import Tensor

from ring_attention_pytorch.arguments import checks_of
from ring_attention_pytorch.inference.attention import (
    agree_on,
    report_to_cache,
    ring_attn_with_cache,
)
from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.latent.attention import check_latents
from ring_attention_pytorch.plan.option_types import LayoutOption
from ring_attention_pytorch.ranks.agreement import reporting, typed

_CALLER = "mla_attn_with_cache"


@typed(report_to_cache)
@torch.no_grad()
def mla_attn_with_cache(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    w_up: Tensor,
    cache: RingCache,
    *,
    layer: int = 0,
    layout: LayoutOption | None = None,
    scale: float | int | None = None,
) -> Tensor:
    """Append latents to a cache, and compute causal attention of their queries to all of it.

    The cache holds latents: `RingCache(sequences, 1, rank + d_rope, value_dim=rank, tied=True)`;
    without `tied` it holds each twice. Each rank holds its share; ranks exchange only partial
    results. There are no gradients. A prompt in chunks is right, too, but takes
    `(2 * rank + d_rope) / (d_nope + d_rope + d_v)` times the FLOPs.

    Args:
        q_nope, q_rope: `[b, n, h, d_nope]` and `[b, n, h, d_rope]`, queries of the last n tokens:
            the same on every rank, or with a layout this rank's shard.
        latent, k_rope: `[b, n, rank]` and `[b, n, d_rope]`, appended to the cache; k_rope rotated.
        w_up: `[h, d_nope + d_v, rank]`, as for `mla_ring_attn`.
        cache: all ranks of its ring call this together.
        layer: the layer of these tensors.
        layout: as for `ring_attn_with_cache`.
        scale: the factor of q.k in a score; None is `(d_nope + d_rope) ** -0.5`.

    Returns:
        `[b, n, h, d_v]`: the same on every rank, or shards in the layout.

    Raises:
        ValueError: shapes don't fit one another or the cache, or ranks differ; on every rank.

    >>> q_nope, q_rope = torch.randn(1, 6, 4, 8), torch.randn(1, 6, 4, 2)
    >>> latent, k_rope, w_up = torch.randn(1, 6, 5), torch.randn(1, 6, 2), torch.randn(4, 11, 5)
    >>> cache = RingCache(1, 1, 5 + 2, value_dim=5, tied=True)
    >>> mla_attn_with_cache(q_nope, q_rope, latent, k_rope, w_up, cache).shape
    torch.Size([1, 6, 4, 3])
    """
    given = {"cache": cache, "q_nope": q_nope, "layer": layer, "layout": layout}
    with reporting(partial(report_to_cache, given)), checks_of(_CALLER):
        codec = check_latents(q_nope, q_rope, latent, k_rope, w_up)
        sizes = 1, codec.rank + codec.d_rope, codec.rank
        if (got := (cache.key_heads, cache.head_dim, cache.value_dim)) != sizes:
            raise ValueError(
                f"the cache must be of latents, RingCache(sequences, 1, {sizes[1]}, value_dim="
                f"{sizes[2]}, tied=True), got {got}"
            )
    agree_on(cache, given, w_up=w_up.shape)
    d = codec.d_nope + codec.d_rope
    up_k, up_v = w_up.split((codec.d_nope, codec.d_v), dim=1)
    with torch.autocast(q_nope.device.type, enabled=False):
        absorbed = einsum(q_nope, up_k, "b n h d, h d r -> b n h r")
        result = ring_attn_with_cache(
            torch.cat((absorbed, q_rope), dim=-1),
            rearrange(torch.cat((latent, k_rope), dim=-1), "b n w -> b n 1 w"),
            None if cache.tied else rearrange(latent, "b n r -> b n 1 r"),
            cache,
            layer=layer,
            layout=layout,
            scale=d**-0.5 if scale is None else scale,
        )
        assert isinstance(result, Tensor)  # lse was not asked for
        return einsum(result, up_v, "b n h r, h v r -> b n h v")
