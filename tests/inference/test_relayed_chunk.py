"""Chunks of a prompt over several machines: exact, across once, merged before they go home."""

import re

import pytest
import torch

from ring_attention_pytorch.geometry.layouts import all_segments, positions
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.inference.attention import ring_attn_with_cache
from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.inference.chunk_costs import ChunkSizes
from ring_attention_pytorch.inference.explain import explain_cache
from ring_attention_pytorch.inference.prefill import PromptChunk
from ring_attention_pytorch.inference.relayed_chunk import RelayedChunk, chunk_over
from ring_attention_pytorch.schedule.pieces import Workload
from ring_attention_pytorch.schedule.relays import across
from tests.support import threads
from tests.support.reference import dense_attention, relative_error

HEADS, KEY_HEADS, D, D_V = 4, 2, 8, 6
TWO, UNEVEN, SHUFFLED = (0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 2, 2, 0, 1)


def prompt(batch: int, n: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(n)
    sizes = (HEADS, D), (KEY_HEADS, D), (KEY_HEADS, D_V)
    return [torch.randn(batch, n, *size, generator=draw).double() for size in sizes]


def a_cache(ring: threads.ThreadRing, batch: int) -> RingCache:
    how = dict(value_dim=D_V, page=2, dtype=torch.float64, group=ring)
    return RingCache(batch, KEY_HEADS, D, **how)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("machines", [TWO, UNEVEN, SHUFFLED, (0, 1, 2)])
def test_a_prompt_in_chunks_is_dense_attention(machines, layout):
    """Of chunks with fewer tokens than ranks, too, in which some ranks have none."""
    size, chunks, batch = len(machines), (13, 2, 8, 1), 2
    whole = prompt(batch, sum(chunks))
    want, want_lse = dense_attention(*whole, causal=True)

    def worst(ring: threads.ThreadRing) -> float:
        cache, start, errors = a_cache(ring, batch), 0, []
        kind = RelayedChunk if machines != (0, 1, 2) else PromptChunk
        assert type(chunk_over(ring, layout, chunks)) is kind
        for n in chunks:
            at = start + positions(layout, rank=ring.rank, ring_size=size, length=n)
            mine = [t[:, at] for t in whole]
            out, lse = ring_attn_with_cache(*mine, cache, layout=layout, return_lse=True)
            errors.append(relative_error(out, want[:, at]))
            errors.append(relative_error(lse, want_lse[..., at]))
            start += n
        return max(errors)

    assert max(threads.run(size, worst, machines)[0]) < 1e-12


@pytest.mark.parametrize("machines", [TWO, UNEVEN])
def test_a_chunk_crosses_once_and_comes_back_as_one_result(machines):
    """Of the second chunk, without its attention to itself; each rank says its bytes before."""
    size, each = len(machines), 128
    n = size * each
    sizes = ChunkSizes(size, 1, each, HEADS, KEY_HEADS, D, D_V, itemsize=8, wide=8, copied=8)
    crossing = []

    def sent(ring: threads.ThreadRing) -> tuple[int, str]:
        cache = a_cache(ring, 1)
        at = positions("striped", rank=ring.rank, ring_size=size, length=n)
        mine = [t[:, at] for t in prompt(1, n)]
        ring_attn_with_cache(*mine, cache, layout="striped")
        ring.hub.barrier.wait()
        before = dict(ring.hub.ways), ring.hub.sent_bytes[ring.rank]
        ring.hub.barrier.wait()
        ring_attn_with_cache(*mine, cache, layout="striped")
        ring.hub.barrier.wait()
        if ring.rank == 0:
            crossing.extend(
                nbytes - before[0].get(way, 0)
                for way, nbytes in ring.hub.ways.items()
                if machines[way[0]] != machines[way[1]]
            )
        return ring.hub.sent_bytes[ring.rank] - before[1], explain_cache(cache, HEADS, n)

    found, _ = threads.run(size, sent, machines)
    everyone = all_segments("striped", size, n)
    of_itself = across(Workload(everyone, everyone, Mask(causal=True)), machines).relayed
    itself = of_itself * sizes.key_heads * (D + D_V) * 8
    parts = size * (len({*machines}) - 1)
    assert sum(crossing) - itself == parts * (sizes.message + sizes.result)
    stated = 0.0
    for nbytes, told in found:
        every, far = re.search(r"sends (\S+) MiB a.* relays, with (\S+) MiB", told).groups()
        assert nbytes / 2**20 >= float(every) - 0.01
        stated += float(far)
    assert stated == pytest.approx(parts * (sizes.message + sizes.result) / 2**20, abs=0.005 * size)
