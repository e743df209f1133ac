"""PyTorch's flash attention on the CPU: how its tiles are cut, and which rows see no key."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ring_attention_pytorch.geometry.tiles import Tile, band, trim
from ring_attention_pytorch.kernels import sdpa
from tests.support.blocks import CPU, Block
from tests.support.positions import quickly

numbers = st.none() | st.integers(0, 12)


@pytest.mark.parametrize("bucket", [1, 3, 4, 256])
@pytest.mark.parametrize("n", [1, 2, 5, 8, 300, 513])
def test_pieces_of_a_causal_tile_show_what_it_shows_once(n, bucket):
    tile = Tile(slice(2, 2 + n), slice(1, 1 + n), None, 0)
    times = torch.zeros(n + 2, n + 1, dtype=torch.long)
    for piece in sdpa._pieces(tile, max(bucket, n // 32)):
        assert piece[2:] in ((None, 0), (None, None))
        times[piece.rows, piece.cols] += band(piece, CPU).long()
    want = torch.zeros_like(times)
    want[tile.rows, tile.cols] = torch.ones(n, n).tril().long()
    assert torch.equal(times, want)


@quickly
@given(st.integers(1, 12), st.lists(st.booleans(), min_size=1, max_size=12), numbers, numbers)
def test_rows_that_see_no_key_are_known(n, visible, left, right):
    tile = trim(slice(0, n), slice(0, len(visible)), left, right)
    if tile is None:
        return
    keys = torch.tensor([visible])[:, tile.cols]
    want = ~(band(tile, CPU) & keys[:, None]).any(-1)
    assert torch.equal(sdpa._unseen(keys, tile), want)


@pytest.mark.parametrize(("left", "right"), [(None, -3), (-2, None), (-6, 9), (2, -1), (3, 0)])
def test_rows_beyond_all_keys_see_none(left, right):
    """A tile that nobody has trimmed has rows before its first key, and behind its last one."""
    tile, keys = (
        Tile(slice(0, 15), slice(0, 4), left, right),
        torch.tensor([[True, False, True, True]]),
    )
    want = ~(band(tile, CPU) & keys[:, None]).any(-1)
    assert torch.equal(sdpa._unseen(keys, tile), want)


@pytest.mark.parametrize("stride", ["dense", "heads before tokens", "every other"])
def test_it_reads_each_head_of_a_token_in_one_piece(stride):
    t = torch.randn(2, 6, 4, 16)
    lies = {"dense": t, "heads before tokens": t.transpose(1, 2), "every other": t[..., ::2]}[
        stride
    ]
    heads_first = sdpa._heads_first(lies, lies.shape[-1])
    assert torch.equal(heads_first, lies.transpose(1, 2))
    assert heads_first.stride(-1) == 1
    assert (heads_first.data_ptr() == lies.data_ptr()) == (stride != "every other")


def test_one_value_for_a_head_can_have_any_stride():
    block = Block((6, 6, 1, 1, 1, 1), Tile(slice(0, 6), slice(0, 6), None, 0))
    block.v = block.v.to(memory_format=torch.channels_last)
    assert block.v.is_contiguous()
    assert block.v.stride(-1) > 1  # padding keeps it, and the op assumes 1
    block.assert_right("sdpa")


@pytest.mark.parametrize("d", [(8, 5), (5, 8)])
def test_heads_of_k_and_v_may_differ_in_size(d):
    Block((70, 70, 4, 2, *d), Tile(slice(0, 70), slice(0, 70), None, 0)).assert_right("sdpa")


def test_rows_whose_scores_are_nan_are_nan_and_no_others():
    block = Block((6, 6, 2, 1, 4, 4), Tile(slice(0, 6), slice(0, 6), None, 0))
    block.q[:, 2] = torch.nan
    out = block.run("sdpa")["out"]
    assert out[:, 2].isnan().all()
    assert not out[:, [0, 1, 3, 4, 5]].isnan().any()
