"""What flash attentions share: bands from the bottom right, memory, gradients of lse."""

import pytest
import torch

from ring_attention_pytorch.geometry.tiles import band, trim
from ring_attention_pytorch.kernels._flash import (
    aligned,
    from_bottom_right,
    windows,
    with_lse_gradient,
)
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from ring_attention_pytorch.runtime.interfaces import Grads, KVBlock, Residuals, ScoreMods
from tests.support.reference import dense_attention, relative_error
from tests.support.stand_ins import shown, shown_2

CPU = torch.device("cpu")


@pytest.mark.parametrize("n", range(1, 8))
@pytest.mark.parametrize("m", range(1, 6))
def test_bands_from_the_bottom_right_show_the_same(n, m):
    for left in (None, *range(-6, 7)):
        for right in (None, *range(-6, 7)):
            tile = trim(slice(0, n), slice(0, m), left, right)
            if tile is not None:
                size = tile.rows.stop - tile.rows.start, tile.cols.stop - tile.cols.start
                assert torch.equal(shown(*size, *from_bottom_right(tile)), band(tile, CPU))
                parts = [
                    shown_2(part.rows.stop - part.rows.start, size[1], *bounds)
                    for part, bounds in windows([tile])
                ]
                assert torch.equal(torch.cat(parts), band(tile, CPU))


def test_what_lies_right_stays_where_it_is():
    t = torch.zeros(2, 6, 4, 8)
    same = [t, t[:, 2:], t[:, :, :1], t[..., :4]]
    moved = [t[..., 1:5], t[:, :, :1].expand(2, 6, 4, 8), t.transpose(2, 3)]
    assert all(a is b for a, b in zip(aligned(*same), same))
    for a, b in zip(aligned(*moved), moved):
        assert a is not b
        assert torch.equal(a, b)
        assert a.is_contiguous()


def of_out_alone(saved, keys, tiles, terms, grads):
    """A backward that knows no gradient of lse, and rounds what it reads to the inputs' dtype."""
    assert saved.dlse is None or saved.out.dtype == torch.float16
    q, k, v, out, dout = (t.double() for t in (saved.q, keys.k, keys.v, saved.out, saved.dout))
    p = (torch.einsum("bihd,bjhd->bhij", q, k) * terms.scale - saved.lse[..., None]).exp()
    inner = torch.einsum("bihd,bjhd->bhij", dout, v) - (dout * out).sum(-1).mT[..., None]
    ds = p * inner * terms.scale
    found = (
        torch.einsum("bhij,bjhd->bihd", ds, k),
        torch.einsum("bhij,bihd->bjhd", ds, q),
        torch.einsum("bhij,bihd->bjhd", p, dout),
    )
    for total, part in zip(grads, found):
        total.add(slice(0, part.shape[1]), part.to(saved.q.dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 1e-12, 0.0])
def test_the_gradient_of_lse_is_in_whatever_dout_is(dtype, size):
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, 5, 3, 8), (2, 6, 3, 8), (2, 6, 3, 8), (2, 5, 3, 8), (2, 3, 5)]
    q, k, v, dout, dlse = (torch.randn(s, generator=draw).to(dtype).double() for s in shapes)
    dout[:, ::2] *= size
    dlse[:, 1], dlse[:, 2] = 0.0, 100 * dlse[:, 2]
    dout = dout.to(dtype).double()
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = dense_attention(*leaves)
    want = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    given = [t.detach().to(dtype) for t in (q, out, dout, k, v)]
    wide = torch.promote_types(dtype, torch.float32)
    saved = Residuals(*given[:2], lse.detach().to(wide), given[2], dlse.to(wide))
    keys = KVBlock(*given[3:], None, (), own=True)
    grads = Grads(*(GradAccumulator(t) for t in (given[0], *given[3:])))
    with_lse_gradient(of_out_alone, saved, keys, (), ScoreMods(8**-0.5, None, 1024), grads)
    for name, total, right in zip("qkv", grads, want):
        assert relative_error(total.finalize(), right) < 8 * torch.finfo(dtype).eps, name
