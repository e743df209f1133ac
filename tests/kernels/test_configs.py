"""Blocks of the Triton kernels: chosen for each head size, device and length."""

from itertools import product

import pytest
import torch

from ring_attention_pytorch.kernels._configs import Config, apart, config_for, configured
from ring_attention_pytorch.runtime.launches import power_of_2

WIDTHS = (*range(1, 270), *range(270, 513, 11), 512)


def shared_bytes(direction: str, config: Config, d: int, d_v: int, dtype: torch.dtype) -> int:
    """Shared memory of the blocks that a kernel stays with, and of those of all its stages."""
    d, d_v = power_of_2(d), power_of_2(d_v)
    rows, cols = dict(forward=(d, d + d_v), dv=(d + d_v, d)).get(direction, (d + d_v, d + d_v))
    rows, cols = rows * config.rows, cols * config.cols
    stays, passes = (rows, cols) if direction in ("forward", "queries") else (cols, rows)
    return (stays + config.stages * passes) * dtype.itemsize


@pytest.mark.parametrize("direction", ["forward", "keys", "dk", "dv", "queries"])
@pytest.mark.parametrize("capability", [None, (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_head_size_has_a_config(direction, capability, dtype):
    for width in WIDTHS:
        if direction not in ("forward", "queries") and apart(width) == (direction == "keys"):
            continue
        for seen, rows, group in product((10, 1000, 2000, 10_000), (0, 8000), (1, 8)):
            config = config_for(direction, (width, width), dtype, capability, seen, rows, group)
            assert {config.rows, config.cols} <= {8, 16, 32, 64, 128}
            # a product sums over 16 numbers at least
            assert (config.cols if direction in ("forward", "queries") else config.rows) >= 16
            # copies of rows' numbers begin at 128 bytes
            assert not config.tma or direction in ("forward", "queries") or config.rows >= 32
            big = capability in ((9, 0), (10, 0))
            assert (
                shared_bytes(direction, config, width, width, dtype) <= (227 if big else 99) * 1024
            )


@pytest.mark.parametrize("direction", ["forward", "keys", "queries"])
@pytest.mark.parametrize("capability", [None, (8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_larger_head_size_decides_but_where_keys_of_192_meet_values_of_128(
    direction, capability, dtype
):
    for d, d_v in product((*range(1, 257, 17), 64, 65, 128, 129, 192, 256), repeat=2):
        more = dtype, capability, 10_000, 8000, 1
        config = config_for(direction, (d, d_v), *more)
        larger = config_for(direction, (max(d, d_v),) * 2, *more)
        swept = d > 128 and 64 < d_v <= 128 and dtype.itemsize == 2
        swept = swept and capability in ((9, 0), (10, 0))
        assert (config != larger) == swept, (d, d_v)
        assert shared_bytes(direction, config, d, d_v, dtype) <= 227 * 1024


def test_few_keys_take_smaller_blocks_on_hopper_only():
    for direction, capability in (("forward", (9, 0)), ("queries", (9, 0)), ("forward", (8, 0))):
        areas = []
        for seen in (100, 1000, 10_000):
            found = config_for(direction, (128, 128), torch.bfloat16, capability, seen, 16_000)
            areas.append(found.rows * found.cols)
        smaller = areas[0] < areas[1] < areas[2]
        assert smaller == (capability == (9, 0)), (direction, areas)


def test_query_heads_of_a_key_head_share_blocks_on_hopper_only():
    """As many as a block has room for and there are; a multiple of four, for so it was swept."""
    for group, pack in ((1, 1), (3, 1), (4, 4), (6, 1), (8, 8), (12, 4), (16, 8)):
        for direction in ("forward", "keys", "queries"):
            asked = direction, (128, 128), torch.bfloat16
            assert config_for(*asked, (9, 0), 100, 8000, group).pack == pack
            assert config_for(*asked, (8, 0), 100, 8000, group).pack == 1
            assert (
                config_for(direction, (128, 128), torch.float32, (9, 0), 100, 8000, group).pack == 1
            )


def test_a_short_sequence_is_not_as_documents_are():
    """It has few blocks, so they had better be large: each goes on for long."""
    asked = "queries", (128, 128), torch.bfloat16, (9, 0)
    whole, documents = (config_for(*asked, seen=100, rows=rows) for rows in (200, 8000))
    assert whole.rows > documents.rows


def test_blocks_have_tokens_for_16_bytes_of_numbers():
    assert [Config(rows, 16, 4, 1, pack=8).of_group(8).pack for rows in (16, 32, 64)] == [4, 8, 8]


def test_another_config_holds_while_it_is_asked_for():
    asked = ("forward", (128, 128), torch.bfloat16, (9, 0))
    usual, other = config_for(*asked), Config(16, 16, 1, 1)
    with configured(forward=other):
        assert config_for(*asked) == other
    assert config_for(*asked) == usual
