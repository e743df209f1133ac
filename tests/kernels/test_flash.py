"""The common part of flash attentions: bands from the bottom right, and alignment."""

import pytest
import torch

from ring_attention_pytorch.geometry.tiles import band, trim
from ring_attention_pytorch.kernels._flash import aligned, from_bottom_right, windows
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
