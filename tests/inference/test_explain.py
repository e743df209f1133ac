"""Explanations of what a cache holds, reads and sends: the numbers of its tensors."""

import re

import pytest
import torch

from benchmarks.lib import prefill
from ring_attention_pytorch import RingCache, explain_cache, ring_attn_with_cache
from ring_attention_pytorch.inference.explain import chunk_sizes
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.schedule import relays
from tests.support import threads

SIZES = dict(sequences=2, key_heads=8, head_dim=64, page=4)


def of_ranks(size: int, tokens: int = 1, machines: tuple[int, ...] = ()) -> list[str]:
    k = torch.zeros(2, 512, 8, 64)

    def told(ring: Ring) -> str:
        cache = RingCache(**SIZES, group=ring)
        cache.append(k, k)
        return explain_cache(cache, 16, tokens)

    return threads.run(size, told, machines)[0]


def mib(text: str, words: str) -> float:
    """The number of MiB before or after some words."""
    found = re.search(rf"{words} ([\d.]+) MiB|([\d.]+) MiB {words}", text)
    assert found is not None, text
    return float(found[1] or found[2])


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_and_read_their_share_and_send_results_of_new_tokens(size: int) -> None:
    whole = 2 * 512 * 8 * (64 + 64) * 4 / 2**20  # MiB of keys and values in float32
    for text in of_ranks(size):
        assert f"holds {1024 // size} of 1024 tokens on this rank, in pages of 4" in text
        assert mib(text, "reads") == pytest.approx(whole / size, abs=0.01)
        assert mib(text, "sends") == pytest.approx(
            (size - 1) * 2 * 16 * (64 + 1) * 4 / 2**20, abs=0.01
        )
        assert mib(text, "the cached keys,") == pytest.approx(whole * (size - 1) / size, abs=0.01)


def test_on_several_machines_results_go_to_one_s_own_and_what_they_merge_to_others_in_pieces(
    monkeypatch,
) -> None:
    """On the machine of three each has a third of the result, and rank 0 what rank 3 sends."""
    for text in of_ranks(4, machines=(0, 0, 0, 1)):
        assert "to each other rank" in text, "one exchange is faster for so few bytes"
    monkeypatch.setattr(relays, "_EXCHANGE", 0)
    each = 2 * 16 * (64 + 1) * 4 / 2**20
    third = each / 3
    near, passed = 2 * each + 2 * third, 2 * each
    sent = (near + third + passed, near + third, near + third, each)
    for rank, text in enumerate(of_ranks(4, machines=(0, 0, 0, 1))):
        assert mib(text, "sends") == pytest.approx(sent[rank], abs=0.01)
        crossing = each if rank == 3 else third
        assert f"{crossing:.2f} MiB of it its piece of what they merge to 1 of others" in text


@pytest.mark.parametrize(
    ("dtype", "heads"), [(torch.float32, 512), (torch.float64, 256), (torch.float64, 1)]
)
@pytest.mark.parametrize("machines", [(0, 0, 0, 1), (0, 1, 0, 1)])
def test_the_bytes_of_a_decode_step_are_those_sent(monkeypatch, machines, dtype, heads) -> None:
    """Ranks merge from 0.39 MB on, which are half as many numbers in float64 as in float32."""
    monkeypatch.setattr(relays, "_EXCHANGE", 390_000)

    def said_and_sent(ring: threads.ThreadRing) -> tuple[str, int]:
        cache = RingCache(3, 1, 64, dtype=dtype, group=ring)
        q, k = (torch.zeros(3, 1, h, 64, dtype=dtype) for h in (heads, 1))
        ring_attn_with_cache(q, k, k, cache)
        return explain_cache(cache, heads), ring.hub.sent_bytes[ring.rank]

    for text, nbytes in threads.run(4, said_and_sent, machines)[0]:
        assert mib(text, "sends") == pytest.approx(nbytes / 2**20, abs=0.01)
        assert ("to each rank of its machine" in text) == (heads > 1)


def test_a_chunk_is_also_told_what_it_takes() -> None:
    for text in of_ranks(2, tokens=64):
        assert "its part of the chunk to each other rank and results home" in text
        assert mib(text, "takes") > mib(text, "sends") > 0


@pytest.mark.parametrize("machines", [(0, 0, 0, 0), (0, 0, 1, 1)])
@pytest.mark.parametrize("before", [64, 4096])
def test_the_benchmark_of_prompts_plans_the_memory_that_is_explained(machines, before) -> None:
    """With cached keys that travel, with results that relays merge, and on one machine."""
    n, sizes = 64, (prefill.KEY_HEADS, prefill.D)

    def planned(ring: Ring) -> tuple[float, str]:
        cache = RingCache(1, *sizes, dtype=torch.bfloat16, group=ring)
        k = torch.zeros(1, before, *sizes, dtype=torch.bfloat16)
        cache.append(k, k)
        found = prefill.memory(cache, n, lambda: None, cache.device)
        return found["planned_mib"], explain_cache(cache, prefill.HEADS, n)

    for figure, text in threads.run(4, planned, machines)[0]:
        assert figure == pytest.approx(mib(text, "takes"), abs=0.06)


def test_windows_and_who_is_alone_send_nothing() -> None:
    cache = RingCache(1, 1, 4, windows=[3], spare=2, page=1, group=Ring.alone())
    text = explain_cache(cache, 1)
    assert "sends nothing: this rank is alone" in text
    assert "a window of 3 tokens keep 7 of each sequence on every rank, and send nothing" in text


@pytest.mark.parametrize("machines", [(0, 0, 0, 0), (0, 0, 1, 1)])
def test_windows_send_the_keys_of_a_chunk(machines) -> None:
    def said_and_sent(ring: threads.ThreadRing) -> tuple[str, int]:
        cache = RingCache(1, 8, 64, windows=[3], group=ring)
        k = torch.zeros(1, 64, 8, 64)
        ring_attn_with_cache(k, k, k, cache, layout="zigzag", window=3)
        return explain_cache(cache, 8, 256), ring.hub.sent_bytes[ring.rank]

    for text, nbytes in threads.run(4, said_and_sent, machines)[0]:
        assert mib(text, "sends") == pytest.approx(nbytes / 2**20, abs=0.01)
        assert "send the chunk's keys alone" in text


def test_tokens_of_a_chunk_are_counted_up_and_kept_ones_in_whole_pages() -> None:
    cache = RingCache(**SIZES, group=Ring.alone())
    k = torch.zeros(2, 5, 8, 64)
    cache.append(k, k)
    chunk, held = chunk_sizes(cache, 16, 7)
    assert (chunk.tokens, chunk.itemsize, chunk.wide, chunk.copied) == (7, 4, 4, 4)
    assert held == 2 * 8
