"""Chunks of a prompt over several machines: exact, across once, merged before they go home."""

import re
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch

from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.inference import prefill
from ring_attention_pytorch.inference.attention import ring_attn_with_cache
from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.inference.chunk_costs import ChunkSizes
from ring_attention_pytorch.inference.explain import explain_cache
from ring_attention_pytorch.inference.prefill import PromptChunk
from ring_attention_pytorch.inference.relayed_chunk import RelayedChunk, chunk_over
from tests.support import threads
from tests.support.over_machines import SHUFFLED, TWO, UNEVEN, far
from tests.support.reference import dense_attention, relative_error

HELD = (0, 0, 0, 1, 1, 1, 1)  # a relay merges results for two owners, each with two others
HEADS, KEY_HEADS, D, D_V = 4, 2, 8, 6


def prompt(batch: int, n: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(n)
    sizes = (HEADS, D), (KEY_HEADS, D), (KEY_HEADS, D_V)
    return [torch.randn(batch, n, *size, generator=draw).double() for size in sizes]


def shapes(heads: int) -> list[tuple[int, int]]:
    return [(heads, D), (KEY_HEADS, D), (KEY_HEADS, D_V)]


def a_cache(ring: threads.ThreadRing, batch: int, **how: Any) -> RingCache:
    how |= dict(value_dim=D_V, page=2, dtype=torch.float64, group=ring)
    return RingCache(batch, KEY_HEADS, D, **how)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("machines", [TWO, UNEVEN, SHUFFLED, HELD, (0, 1, 2)])
def test_a_prompt_in_chunks_is_dense_attention(machines, layout):
    """Chunks can have fewer tokens than ranks; by the last one results go home to every rank."""
    size, batch = len(machines), 2
    chunks = 13, 2, 8, 1, size
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


TOLD = {
    "queries": r"sends (\S+) MiB a.* relays, with (\S+) MiB.* results home",
    "keys": r"sends (\S+) MiB a layer, its keys.* relays, with (\S+) MiB",
}


@pytest.mark.parametrize("machines", [TWO, UNEVEN, SHUFFLED])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("heads", [2, 8])
def test_what_is_new_and_the_fewest_bytes_of_the_cache_cross_once(machines, tied, heads):
    """Cached keys cross while they are few, then queries and merged results instead.

    Heads decide after how many chunks. Each rank says its bytes before.
    """
    size, each, chunks = len(machines), 16, 4
    n, parts = size * each, len({*machines}) - 1
    sizes = ChunkSizes(size, 1, each, heads, KEY_HEADS, D, D_V, 8, 8, copied=8, tied=tied)
    crossed = []

    def main(ring: threads.ThreadRing) -> list[tuple[int, str]]:
        cache, found = a_cache(ring, 1, tied=tied), []
        q, k, v = (torch.randn(1, each, h, d).double() for h, d in shapes(heads))
        for _ in range(chunks):
            told, mine = explain_cache(cache, heads, n), ring.hub.sent_bytes[ring.rank]
            ring_attn_with_cache(q, k, None if tied else v, cache, layout="striped")
            found.append((ring.hub.sent_bytes[ring.rank] - mine, told))
            crossed.append(far(ring))
        return found

    found, _ = threads.run(size, main, machines)
    kinds, so_far = set(), [0, *sorted({*crossed})]
    assert len(so_far) == chunks + 1, "all ranks count the same"
    for number, nbytes in enumerate(after - before for before, after in pairwise(so_far)):
        cached, asked = number * n * sizes.key, size * (sizes.queries + sizes.result)
        assert nbytes == parts * (size * sizes.keys + min(cached, asked))
        kind = "keys" if cached < asked else "queries"
        kinds.add(kind)
        told = [re.search(TOLD[kind], text).groups() for _, text in (of[number] for of in found)]
        assert sum(float(far) for _, far in told) == pytest.approx(nbytes / 2**20, abs=0.005 * size)
        sent = [of[number][0] / 2**20 for of in found]
        assert sent == pytest.approx([float(every) for every, _ in told], abs=0.01)
    assert len(kinds) == (2 if heads == 2 else 1)


@pytest.mark.parametrize("machines", [TWO, UNEVEN, SHUFFLED])
@pytest.mark.parametrize("kind", ["window", "tied", "alibi_slopes", "padding"])
def test_a_chunk_by_the_decoding_kernel_comes_back_as_one_result_too(machines, kind):
    """A rank gets the results for its own queries alone, and merges sinks into these once."""
    size, each, tied = len(machines), 8, kind == "tied"
    sizes = ChunkSizes(size, 1, each, HEADS, KEY_HEADS, D, D_V, 8, 8, copied=8, tied=tied)
    q, k, v = prompt(1, 2 * size * each)
    v = k[..., :D_V] if tied else v
    slopes, sinks = torch.rand(HEADS).double(), torch.randn(HEADS).double()
    terms = dict(window=dict(window=9), tied=dict(window=9), alibi_slopes=dict(alibi_slopes=slopes))
    given = {"sinks": sinks, **terms.get(kind, {})}
    hidden = torch.arange(2 * size * each)[None] >= (3 if kind == "padding" else 0)
    want, want_lse = dense_attention(q, k, v, causal=True, key_mask=hidden, **given)

    def main(ring: threads.ThreadRing) -> tuple[float, int]:
        cache, worst = a_cache(ring, 1, tied=tied), 0.0
        if kind == "padding":
            cache.hide_before([3])
        for first in (0, size * each):
            before = far(ring)
            at = first + positions("zigzag", rank=ring.rank, ring_size=size, length=size * each)
            mine = q[:, at], k[:, at], None if tied else v[:, at]
            out, lse = ring_attn_with_cache(*mine, cache, layout="zigzag", return_lse=True, **given)
            errors = relative_error(out, want[:, at]), relative_error(lse, want_lse[..., at])
            worst = max(worst, *errors)
        return worst, far(ring) - before

    parts = size * (len({*machines}) - 1)
    for error, nbytes in threads.run(size, main, machines)[0]:
        assert error < 1e-12
        assert nbytes == parts * (sizes.message + sizes.result)


@pytest.mark.parametrize("machines", [TWO, UNEVEN, (0, 1)])
@pytest.mark.parametrize("tied", [False, True])
def test_cached_keys_that_cross_are_of_sequences_of_any_lengths(machines, tied, monkeypatch):
    """With sinks; the second sequence is shorter, the third is empty."""
    size, lengths, n = len(machines), (9, 4, 0), 11
    q, k, v = (torch.randn(3, 9 + n, h, d).double() for h, d in shapes(HEADS))
    v, sinks = k[..., :D_V] if tied else v, torch.randn(HEADS).double()

    def worst(ring: threads.ThreadRing) -> float:
        cache, errors = a_cache(ring, 3, tied=tied), []
        cache.append(k[:, :9], None if tied else v[:, :9])
        cache.rollback([9 - length for length in lengths])
        at = positions("zigzag", rank=ring.rank, ring_size=size, length=n)
        new = [t[:, 9:][:, at] for t in (q, k, v)]
        if tied:
            new[2] = None
        out = ring_attn_with_cache(*new, cache, sinks=sinks, layout="zigzag")
        for i, length in enumerate(lengths):
            seen = [torch.cat((t[i : i + 1, :length], t[i : i + 1, 9:]), 1) for t in (k, v)]
            places = torch.arange(length, length + n), torch.arange(length + n)
            one = q[i : i + 1, 9:]
            want, _ = dense_attention(one, *seen, causal=True, positions=places, sinks=sinks)
            errors.append(relative_error(out[i : i + 1], want[:, at]))
        return max(errors)

    monkeypatch.setattr(prefill, "keys_travel", travel := mock.Mock(return_value=True))
    assert max(threads.run(size, worst, machines)[0]) < 1e-12
    travel.assert_called()
