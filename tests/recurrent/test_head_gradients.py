"""The kernel of gradients within chunks, through Triton's interpreter, against autograd."""

import math

import pytest
import torch
from torch import Tensor

from tests.support.interpreter import needs_triton
from tests.support.reference import relative_error

SPANS = [(0, 70), (70, 1), (71, 64)]
HEADS, KEY_HEADS = 4, 2


def chunk_loss(
    q: Tensor, k: Tensor, g: Tensor, v: Tensor, h: Tensor, do: Tensor, dh: Tensor
) -> Tensor:
    """Return a loss of a chunk's outputs and the state after it, by its values v and state h."""
    q, k = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (q, k))
    since = (g[:, None] - g[None]).permute(2, 0, 1).tril()
    seen = torch.ones(len(g), len(g)).tril()
    scores = 0.5 * torch.einsum("ihk,jhk->hij", q, k) * since.exp2() * seen
    of_state = 0.5 * torch.einsum("ihk,hkv->ihv", q * g.exp2()[..., None], h)
    out = of_state + torch.einsum("hij,jhv->ihv", scores, v)
    keys = k * (g[-1] - g).exp2()[..., None]
    after = g[-1].exp2()[:, None, None] * h + torch.einsum("ihk,ihv->hkv", keys, v)
    return (out * do).sum() + (after * dh).sum()


def gradients(d_k: int, d_v: int) -> list[float]:
    """Relative errors of dq, dk, dw and those of summed gates."""
    from ring_attention_pytorch.recurrent.chunks import CHUNK, Chunks, How, Inputs, Returned
    from ring_attention_pytorch.recurrent.head_gradients import head_gradients

    draw = torch.Generator().manual_seed(0)
    how, n = How.of(SPANS, torch.device("cpu")), sum(length for _, length in SPANS)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=draw).half() / 4

    q, k, w = normal(n, KEY_HEADS, d_k), normal(n, KEY_HEADS, d_k), normal(n, HEADS, d_k)
    v, do, dv = (normal(n, HEADS, d_v) for _ in range(3))
    h, dh = (normal(len(how.chunk_indices), HEADS, d_k, d_v) for _ in range(2))
    g = -torch.rand(1, n, HEADS, generator=draw) / 30
    places = []
    for run, number in how.chunk_indices.tolist():
        first, end = how.spans[run].tolist()
        here = slice(first + number * CHUNK, min(first + (number + 1) * CHUNK, end))
        g[:, here] = g[:, here].cumsum(1)
        places.append(here)
    x = Inputs(q, k, v, g, g, 0.5)
    found = head_gradients(x, Chunks(q, k, w, v, g, ()), Returned(h, v, dh, dv, do, ()), how)
    leaves = [t[0].double().requires_grad_() for t in (q, k, g)]
    rest = [t[0].double() for t in (v, h, do, dh)]
    total = sum(
        chunk_loss(*(t[here] for t in leaves), rest[0][here], rest[1][c], rest[2][here], rest[3][c])
        for c, here in enumerate(places)
    )
    dq, dk, dg = torch.autograd.grad(total, leaves)
    dw = [-torch.einsum("ihv,hkv->ihk", dv[0, here].double(), rest[1][c])
          for c, here in enumerate(places)]  # fmt: skip
    dg = dg / math.log(2)  # gates are to base e before they are summed
    return [relative_error(a[0], b) for a, b in zip(found, (dq, dk, torch.cat(dw), dg))]


@needs_triton
@pytest.mark.parametrize(("d_k", "d_v"), [(24, 40), (80, 16)])
def test_gradients_of_chunks(interpreted, d_k, d_v) -> None:
    assert max(interpreted.submit(gradients, d_k, d_v).result()) < 3e-3
