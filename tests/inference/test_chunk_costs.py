"""Bytes of a chunk: those of tensors of its sizes, counted one by one."""

import pytest
import torch

from ring_attention_pytorch.inference.chunk_costs import ChunkSizes

SIZES = ChunkSizes(
    ranks=3, sequences=2, tokens=5, heads=4, key_heads=2, head_dim=8, value_dim=6,
    itemsize=2, wide=4, copied=7,
)  # fmt: skip


def nbytes(*tensors: torch.Tensor) -> int:
    return sum(t.nbytes for t in tensors)


def test_messages_and_results_have_the_bytes_of_their_tensors() -> None:
    b, n, h, g, d, d_v = 2, 5, 4, 2, 8, 6
    half = torch.bfloat16
    q, k = torch.empty(b, n, h, d, dtype=half), torch.empty(b, n, g, d, dtype=half)
    v, out = torch.empty(b, n, g, d_v, dtype=half), torch.empty(b, n, h, d_v, dtype=half)
    assert SIZES.message == nbytes(q, k, v)
    assert SIZES.result == nbytes(out, torch.empty(b, n, h))
    assert SIZES.sent == 2 * (SIZES.message + SIZES.result)


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("relayed", [False, True])
def test_memory_is_that_of_the_cached_keys_copies_or_later_of_the_chunks_own(
    ranks: int, relayed: bool
) -> None:
    sizes = SIZES._replace(ranks=ranks)
    elsewhere = 3 * ranks if relayed else 2 * (ranks - 1)
    fixed = ranks * sizes.message + (elsewhere + 3) * sizes.result
    later = 2 * ranks * sizes.keys + 4 * sizes.result
    assert sizes.memory(0, relayed=relayed) == fixed + later
    many = 1 + later // (2 * (8 + 6) * 7)
    assert sizes.memory(many, relayed=relayed) == fixed + many * 2 * (8 + 6) * 7


@pytest.mark.parametrize("tied", [False, True])
def test_if_cached_keys_travel_they_are_received_and_joined_and_no_queries_are(tied: bool) -> None:
    sizes = SIZES._replace(tied=tied)
    key = 2 * (8 + 6 * (not tied)) * 2  # bytes of a token, of two heads
    new, held, fetched = 2 * 5 * key, 16, 400
    assert (sizes.key, sizes.keys) == (key, new)
    messages = 3 * new + (held + fetched) * key
    copied = held * 2 * (8 + 6) * 7 + fetched * key
    assert sizes.memory(held, fetched) == messages + copied + 4 * sizes.result
    assert sizes.memory(0, 1) == 3 * new + key + 2 * 3 * new + 8 * sizes.result


def test_who_is_alone_sends_nothing() -> None:
    assert SIZES._replace(ranks=1).sent == 0
