"""Documents by their borders."""

from unittest import mock

import pytest

from ring_attention_pytorch.geometry import tiles as tiles_module
from ring_attention_pytorch.geometry.documents import of_borders
from ring_attention_pytorch.geometry.layouts import LAYOUTS, all_segments
from ring_attention_pytorch.geometry.tiles import Mask, tiles


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_pairing_is_near_linear_in_the_number_of_documents(layout):
    for many in (1000, 4000):
        visible = Mask(True, None, of_borders(range(0, 7 * many + 1, 7)))
        everyone = all_segments(layout, 4, 7 * many)
        of_pair = tiles_module._tile_of_pair
        with mock.patch.object(tiles_module, "_tile_of_pair", side_effect=of_pair) as paired:
            found = [tiles(everyone[1], keys, visible) for keys in everyone]
        pieces = sum(len(p) for p in visible.documents.pieces(everyone[1]).values())
        assert paired.call_count <= 4 * pieces
        assert sum(map(len, found)) <= 4 * pieces
