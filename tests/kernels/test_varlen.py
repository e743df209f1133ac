"""Tiles packed into calls of many sequences."""

import pytest
import torch

from ring_attention_pytorch.geometry.tiles import Tile
from ring_attention_pytorch.kernels._varlen import packs
from ring_attention_pytorch.runtime.interfaces import Tiles


def test_the_widest_of_two_calls_goes_first():
    """Its gradients take the place of all keys, whatever comes second is added to them."""
    tiles = [Tile(slice(0, 2), slice(0, 4), None, 2), Tile(slice(2, 4), slice(0, 8), None, 6)]
    for given in (tiles, tiles[::-1]):
        found = packs(Tiles(given), torch.zeros(1, 4, 1, 1), disjoint_keys=True)
        assert [pack.cols.stop for pack in found] == [8, 4]


@pytest.mark.parametrize(("batch", "calls"), [(1, 2), (3, 4)])
def test_a_call_has_at_most_so_many_sequences(batch, calls):
    document = [slice(i, i + 1) for i in range(300)]
    tiles = Tiles(Tile(at, at, None, None) for at in document)
    found = packs(tiles, torch.zeros(batch, 300, 1, 1), disjoint_keys=True)
    assert len(found) == calls
    assert sum(len(pack.sequences["seqused_q"]) for pack in found) == 300 * batch
    assert packs(tiles, torch.zeros(batch, 300, 1, 1), disjoint_keys=True) is found
