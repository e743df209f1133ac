"""Caches of layers while a model reads: a piece at a time gives what the whole gives."""

import pytest
import torch

from ring_attention_pytorch import RingAttention
from ring_attention_pytorch.nn.layer_caches import Reading, TokenChunk, caches_of, token_caches
from ring_attention_pytorch.ranks.ring import Ring
from tests.support.reference import relative_error

DOUBLE = torch.float64


def reading(**options) -> Reading:
    return Reading(Ring.alone(), 2, 24, DOUBLE, torch.device("cpu"), **options)


def layers(*windows: int | None, **options) -> list[RingAttention]:
    sizes = dict(dim_head=4, heads=4, num_grouped_query_heads=2, prenorm=True)
    return [
        RingAttention(8, causal=True, max_lookback_seq_len=window, **sizes, **options).double()
        for window in windows
    ]


@pytest.mark.parametrize("pieces", [[1] * 9, [4, 5], [7, 1, 1]])
def test_pieces_of_any_length_are_the_whole(pieces: list[int]) -> None:
    made = layers(None, 3)
    x = torch.randn(2, 9, 8, dtype=DOUBLE)
    with torch.no_grad():
        for attn, kept in zip(made, caches_of(made, reading())):
            found, at = [], 0
            for piece in x.split(pieces, 1):
                chunk = TokenChunk(
                    torch.arange(at, at + piece.shape[1]), None, None, piece.shape[1]
                )
                assert kept.length == at
                found.append(kept.attend(piece, chunk))
                at += piece.shape[1]
            assert relative_error(torch.cat(found, 1), attn(x)) < 1e-12


def test_layers_share_one_cache_and_those_with_windows_keep_less() -> None:
    first, second = token_caches(layers(None, 3), reading())
    assert first.cache is second.cache
    assert (first.layer, second.layer) == (0, 1)
    assert first.cache.memory(0).window is None
    assert first.cache.key_heads == 2
    assert token_caches([], reading()) == []


def test_padding_is_not_seen() -> None:
    (attn,) = layers(None)
    (kept,) = token_caches([attn], reading(starts=[0, 2]))
    x = torch.randn(2, 6, 8, dtype=DOUBLE)
    with torch.no_grad():
        out = kept.attend(x, TokenChunk(torch.arange(6), None, None, 6))
        assert relative_error(out[0], attn(x)[0]) < 1e-12
        assert relative_error(out[1, 2:], attn(x[:, 2:])[1]) < 1e-12


def test_the_dtype_that_is_kept_may_be_another() -> None:
    cache = reading(cache_dtype=torch.float8_e4m3fn).cache([None], 2, 4, 10)
    assert cache.dtype == torch.float8_e4m3fn
    assert reading().cache([None], 2, 4, 10).dtype == DOUBLE
    assert cache.capacity >= 10
