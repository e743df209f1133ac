"""The kernels of states, through Triton's interpreter, against loops over chunks in float64."""

import pytest
import torch
from torch import Tensor

from tests.support.interpreter import needs_triton
from tests.support.reference import relative_error

HEADS, KEY_HEADS, D_K, D_V, CHUNK = 4, 2, 24, 40, 64
SPANS = [(0, 100), (100, 101), (101, 230)]


def chunks_of(first: int, end: int) -> list[slice]:
    return [slice(t, min(t + CHUNK, end)) for t in range(first, end, CHUNK)]


def by_chunk(g: Tensor, k: Tensor, here: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Decays of a whole chunk and of its start, `[h, d_k or 1]`, and keys decayed to its end."""
    of_k = k[here].repeat_interleave(HEADS // k.shape[1], 1)
    if g.ndim == 3:
        return g[here][-1].exp2(), torch.ones(()), of_k
    own = g[here][..., None]
    return own[-1].exp2(), own.exp2(), of_k * (own[-1] - own).exp2()


def walks(channels: bool) -> list[float]:
    """Relative errors of U, M and gradients of states, of a middle run whose map isn't sent."""
    from ring_attention_pytorch.recurrent.chunks import Chunks
    from ring_attention_pytorch.recurrent.state_maps import gradients_of, store_maps

    draw = torch.Generator().manual_seed(0)
    n, key_heads = SPANS[-1][1], HEADS if channels else KEY_HEADS

    def normal(*shape: int) -> Tensor:
        return torch.randn(n, *shape, generator=draw).half() / 6

    q, k, w = normal(key_heads, D_K), normal(key_heads, D_K), normal(HEADS, D_K)
    u, do, dv = normal(HEADS, D_V), normal(HEADS, D_V), normal(HEADS, D_V)
    g = -torch.rand(n, HEADS, *(D_K,) * channels, generator=draw) / 30
    for first, end in SPANS:
        for here in chunks_of(first, end):
            g[here] = g[here].cumsum(0)
    work = Chunks(*(t[None] for t in (q, k, w, u, g)), ())
    spans = torch.tensor(SPANS)
    sent = torch.tensor([0, 2])
    maps = torch.full((2, HEADS, D_K, D_V + D_K), torch.nan)
    store_maps(work, spans[sent], maps)
    u_and_m = dict(zip([0, 2], maps))
    own = gradients_of(work, do[None], dv[None], spans, 0.5)
    q, k, w, u, do, dv, g = (t.double() for t in (q, k, w, u, do, dv, g))
    found = []
    for run, (first, end) in enumerate(SPANS):
        eye = torch.eye(D_K).double().expand(HEADS, D_K, D_K)
        state = torch.cat((torch.zeros(HEADS, D_K, D_V).double(), eye), -1)
        for here in chunks_of(first, end):
            whole, _, keys = by_chunk(g, k, here)
            wide = torch.cat((u[here], torch.zeros_like(u[here])[..., :1].expand(-1, -1, D_K)), -1)
            value = wide - torch.einsum("nhk,hkv->nhv", w[here], state)
            state = whole[..., None] * state + torch.einsum("nhk,nhv->hkv", keys, value)
        if run in u_and_m:
            found += [relative_error(u_and_m[run][..., :D_V], state[..., :D_V])]
            found += [relative_error(u_and_m[run][..., D_V:], state[..., D_V:])]
        total = torch.zeros(HEADS, D_K, D_V).double()
        for here in reversed(chunks_of(first, end)):
            whole, start, keys = by_chunk(g, k, here)
            value = dv[here] + torch.einsum("nhk,hkv->nhv", keys, total)
            queries = 0.5 * start * q[here].repeat_interleave(HEADS // q.shape[1], 1)
            total = whole[..., None] * total + torch.einsum("nhk,nhv->hkv", queries, do[here])
            total = total - torch.einsum("nhk,nhv->hkv", w[here], value)
        found += [relative_error(own[run], total)]
    return found


@needs_triton
@pytest.mark.parametrize("channels", [False, True])
def test_maps_and_gradients_of_runs(interpreted, channels) -> None:
    assert max(interpreted.submit(walks, channels).result()) < 3e-3
