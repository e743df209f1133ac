"""Tangents of attention on a tile, against forward mode of dense attention and of its gradients."""

import pytest
import torch

from ring_attention_pytorch.geometry.layouts import Segment
from ring_attention_pytorch.geometry.tiles import Tile, band
from ring_attention_pytorch.kernels import eager_jvp
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from ring_attention_pytorch.runtime.interfaces import Grads, KVBlock, Residuals, ScoreMods, Tiles
from tests.support.reference import relative_error

N, M, H, D, D_V = 5, 7, 4, 3, 2
TILES = {
    "all": Tile(slice(0, N), slice(0, M), None, None),
    "a band": Tile(slice(0, N), slice(0, M), 3, 2),
}


def drawn() -> list[torch.Tensor]:
    shapes = (2, N, H, D), (2, M, 2, D), (2, M, 2, D_V)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def dense(tile: Tile, softclamp: float | None):
    """Return `(q, k, v) -> (out, lse)` of what a tile shows."""

    def attention(q, k, v):
        k, v = (t.repeat_interleave(2, dim=2) for t in (k, v))
        scores = 0.5 * torch.einsum("bihd,bjhd->bhij", q, k)
        if softclamp is not None:
            scores = softclamp * torch.tanh(scores / softclamp)
        scores = scores.masked_fill(~band(tile, torch.device("cpu")), -torch.inf)
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), scores.logsumexp(-1)

    return attention


@pytest.mark.parametrize("softclamp", [None, 1.5])
@pytest.mark.parametrize("tile", TILES)
def test_tangents_of_results_and_of_gradients(tile, softclamp):
    attention = dense(TILES[tile], softclamp)
    given, along = drawn(), drawn()
    (out, lse), (tout, tlse) = torch.func.jvp(attention, (*given,), (*along,))
    q, k, v = given
    tq, tk, tv = along
    keys = KVBlock(torch.cat((k, tk), -1), torch.cat((v, tv), -1), None, (Segment(0, 1, M),))
    tiles, terms = Tiles([TILES[tile]]), ScoreMods(0.5, softclamp, 1024)
    b_sum, a_sum = torch.zeros_like(out), torch.zeros_like(lse)
    eager_jvp.forward(q, tq, lse, keys, tiles, terms, (b_sum, a_sum))
    assert relative_error(a_sum, tlse) < 1e-12
    assert relative_error(b_sum - a_sum.mT.unsqueeze(-1) * out, tout) < 1e-12

    cotangents, turning = ((torch.randn_like(out), torch.randn_like(lse)) for _ in range(2))

    def grads_of(q, k, v, dout, dlse):
        return torch.func.vjp(attention, q, k, v)[1]((dout, dlse))

    want, moved = torch.func.jvp(grads_of, (*given, *cotangents), (*along, *turning))
    # dk and dv come as wide as keys travel; dq is made as wide as both, too
    like = torch.cat((q, tq), -1), keys.k, keys.v
    grads = Grads(*map(GradAccumulator, like))
    saved, tangents = Residuals(q, out, lse, *cotangents), Residuals(tq, tout, tlse, *turning)
    eager_jvp.backward(saved, tangents, keys, tiles, terms, grads)
    for total, plain, tangent in zip(grads, want, moved):
        found = total.finalize()
        assert relative_error(found[..., : plain.shape[-1]], tangent) < 1e-12
        assert relative_error(found[..., plain.shape[-1] :], plain) < 1e-12
