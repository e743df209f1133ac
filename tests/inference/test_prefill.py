"""Chunks of a prompt over ranks: what they compare, send and refuse. Values are told by stories."""

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.inference import prefill
from ring_attention_pytorch.inference.attention import ring_attn_with_cache
from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.inference.chunk_costs import ChunkSizes
from ring_attention_pytorch.inference.explain import chunk_sizes, explain_cache
from ring_attention_pytorch.kernels import choose
from ring_attention_pytorch.plan import proposal
from ring_attention_pytorch.ranks.agreement import Disagreement
from ring_attention_pytorch.ranks.ring import Ring, Steps
from ring_attention_pytorch.runtime.interfaces import KernelRequest
from ring_attention_pytorch.schedule.passing import passes_spare
from tests.support import threads
from tests.support.counted import Live
from tests.support.reference import dense_attention, relative_error

HEADS, KEY_HEADS, D, D_V = 4, 2, 8, 6


class Drawn(NamedTuple):
    """A chunk, whole: q, k and v of one sequence."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def of(cls, n: int, seed: int = 0) -> "Drawn":
        draw = torch.Generator().manual_seed(seed)
        sizes = (HEADS, D), (KEY_HEADS, D), (KEY_HEADS, D_V)
        return cls(*(torch.randn(1, n, *size, generator=draw).double() for size in sizes))

    def shard(self, ring: Ring, layout: str) -> list[torch.Tensor]:
        mine = positions(layout, rank=ring.rank, ring_size=ring.size, length=self.q.shape[1])
        return [t[:, mine] for t in self]


def a_cache(ring: Ring, **sizes: Any) -> RingCache:
    return RingCache(
        1, KEY_HEADS, D, value_dim=D_V, page=2, dtype=torch.float64, group=ring, **sizes
    )


def test_chunks_that_are_alike_on_one_rank_only_are_told_apart() -> None:
    """The first of two ranks has 3 tokens of 5, and of 6."""

    def error(ring: threads.ThreadRing) -> float:
        cache, worst = a_cache(ring), 0.0
        for n in (5, 6, 5):
            chunk = Drawn.of(n)
            out = ring_attn_with_cache(*chunk.shard(ring, "contiguous"), cache, layout="contiguous")
            cache.rollback(n)
            want, _ = dense_attention(*chunk, causal=True)
            mine = positions("contiguous", rank=ring.rank, ring_size=2, length=n)
            worst = max(worst, relative_error(out, want[:, mine]))
        return worst

    errors, _ = threads.run(2, error)
    assert max(errors) < 1e-12


def test_chunks_and_layers_that_are_alike_compare_notes_once_each() -> None:
    def compared(ring: threads.ThreadRing) -> list[int]:
        cache, found = a_cache(ring, layers=2), []
        for layer in (0, 1, 0):
            before = ring.hub.gathers[ring.rank]
            shards = Drawn.of(8).shard(ring, "zigzag")
            ring_attn_with_cache(*shards, cache, layer=layer, layout="zigzag")
            found.append(ring.hub.gathers[ring.rank] - before)
        return found

    for found in threads.run(2, compared)[0]:
        assert found[1:] == [1, 1]


def test_however_short_a_chunk_the_fastest_kernel_attends_to_the_cache(monkeypatch) -> None:
    """Not the one for few tokens, which a plan of the chunk alone may take: the cache has many."""

    def kernels(ring: threads.ThreadRing) -> list[str]:
        shards, cache = Drawn.of(8).shard(ring, "zigzag"), a_cache(ring)
        ring_attn_with_cache(*shards, cache, layout="zigzag")
        _, plan = cache.plans.get(("chunk", None))
        return [plan.kernel.name, choose(None, KernelRequest.of(shards[0], shards[2])).name]

    few = mock.Mock()
    monkeypatch.setattr(proposal, "fewest_launches", few)
    for used, fastest in threads.run(2, kernels)[0]:
        assert used == fastest
    few.assert_not_called()


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_sent_is_what_was_said(size: int) -> None:
    n = 4 * size
    chunk = ChunkSizes(size, 1, 4, HEADS, KEY_HEADS, D, D_V, itemsize=8, wide=8, copied=8)

    def sent(ring: threads.ThreadRing) -> tuple[int, str]:
        hub, cache, shards = ring.hub, a_cache(ring), Drawn.of(n).shard(ring, "striped")
        ring_attn_with_cache(*shards, cache, layout="striped")
        before = hub.sent_bytes[ring.rank]
        ring_attn_with_cache(*shards, cache, layout="striped")
        return hub.sent_bytes[ring.rank] - before, explain_cache(cache, HEADS, n)

    for nbytes, told in threads.run(size, sent)[0]:
        assert nbytes == chunk.sent
        assert f"sends {chunk.sent / 2**20:.2f} MiB a layer while it computes" in told
        assert "MiB at most beside the cache" in told


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("window", [0, 3, 5])
@pytest.mark.parametrize("alibi", [False, True])
def test_a_layer_with_a_window_has_each_rank_compute_its_own_queries(layout, window, alibi) -> None:
    """Sequences of 9 and of no tokens; only keys are sent. Slopes of layers differ."""
    n, draw = 11, torch.Generator().manual_seed(window)
    sizes = (HEADS, D), (KEY_HEADS, D), (KEY_HEADS, D_V)
    whole = [torch.randn(2, 9 + n, *size, generator=draw).double() for size in sizes]
    slopes = [torch.rand(HEADS, generator=draw).double() if alibi else None for _ in range(2)]

    def want(layer: int) -> torch.Tensor:
        first, second = (
            dense_attention(
                *(t[i : i + 1, at:] for t in whole), causal=True, window=window,
                alibi_slopes=slopes[layer],
            )[0]
            for i, at in enumerate((0, 9))
        )  # fmt: skip
        return torch.cat((first[:, 9:], second))

    sent = ChunkSizes(3, 2, 4, HEADS, KEY_HEADS, D, D_V, itemsize=8, wide=8, copied=8).keys

    def error(ring: threads.ThreadRing) -> tuple[float, int]:
        cache = RingCache(
            2, KEY_HEADS, D, value_dim=D_V, layers=2, windows=[5, 5], spare=2, page=2,
            dtype=torch.float64, group=ring,
        )  # fmt: skip
        for layer in range(2):
            cache.append(*(t[:, :9] for t in whole[1:]), layer)
        cache.free(1)
        mine = positions(layout, rank=ring.rank, ring_size=3, length=n)
        shard, before = [t[:, 9 + mine] for t in whole], ring.hub.sent_bytes[ring.rank]
        worst = 0.0
        for layer in range(2):
            out = ring_attn_with_cache(
                *shard, cache, layer=layer, layout=layout, window=window,
                alibi_slopes=slopes[layer],
            )  # fmt: skip
            worst = max(worst, relative_error(out, want(layer)[:, mine]))
        assert cache.lengths == [9 + n, n]
        return worst, ring.hub.sent_bytes[ring.rank] - before

    errors, nbytes = zip(*threads.run(3, error)[0])
    assert max(errors) < 1e-12
    assert max(nbytes) == 2 * 2 * sent  # by each layer to two ranks, of four tokens at most


@pytest.mark.parametrize(("padding", "window"), [(4, 5), (5, 5), (9, 5), (0, None), (1, None)])
def test_left_padding_before_the_window_changes_nothing(padding: int, window: int | None) -> None:
    """The chunk's first query sees 5 of 9 tokens. Else the chunk is computed as in decoding."""
    whole = Drawn.of(9 + 8)
    mask = torch.arange(9 + 8)[None] >= padding
    want, _ = dense_attention(*whole, causal=True, window=window, key_mask=mask)

    def found(ring: threads.ThreadRing) -> tuple[float, bool]:
        cache = a_cache(ring, windows=[window])
        cache.hide_before([padding])
        cache.append(*(t[:, :9] for t in whole[1:]))
        mine = 9 + positions("zigzag", rank=ring.rank, ring_size=ring.size, length=8)
        out = ring_attn_with_cache(
            *(t[:, mine] for t in whole), cache, layout="zigzag", window=window
        )
        planned = cache.plans.get(("chunk", window)) is not None
        return relative_error(out, want[:, mine]), planned

    for error, planned in threads.run(2, found)[0]:
        assert error < 1e-12
        assert planned == (padding <= (4 if window else 0))


@pytest.mark.parametrize("option", [{}, dict(window=3), dict(kernel="eager")])
def test_ranks_with_other_numbers_of_heads_hear_so_before_anything_is_sent(option) -> None:
    def refused(ring: threads.ThreadRing) -> int:
        cache, (q, k, v) = a_cache(ring), Drawn.of(8).shard(ring, "zigzag")
        q = q[:, :, : HEADS - 2 * ring.rank]
        with pytest.raises(Disagreement, match=r"heads of q must be .* \[4\] on rank 0, \[2\]"):
            ring_attn_with_cache(q, k, v, cache, layout="zigzag", **option)
        assert cache.lengths == [0]
        return ring.hub.sent_bytes[ring.rank]

    assert threads.run(2, refused)[0] == [0, 0]


@pytest.mark.parametrize("option", [{}, dict(window=9)])
def test_float16_is_attended_to_under_an_autocast_that_does_not_know_it(option) -> None:
    """PyTorch's for CPUs raises as soon as it joins tensors of float16."""
    chunk = Drawn.of(9)
    want, _ = dense_attention(*chunk, causal=True, **option)

    def error(ring: threads.ThreadRing) -> float:
        mine = [t.half() for t in chunk.shard(ring, "zigzag")]
        cache = RingCache(1, KEY_HEADS, D, value_dim=D_V, dtype=torch.float16, group=ring)
        with torch.autocast("cpu", torch.bfloat16):
            out = ring_attn_with_cache(*mine, cache, layout="zigzag", **option)
        at = positions("zigzag", rank=ring.rank, ring_size=2, length=9)
        return relative_error(out, want[:, at])

    assert max(threads.run(2, error)[0]) < 2e-3


@pytest.mark.parametrize("machines", [(0, 0), (0, 1), (0, 0, 1, 1), (0, 0, 0, 1)])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("before", [64, 2048])
def test_a_call_takes_the_memory_that_was_said_at_most(machines, tied, before, monkeypatch) -> None:
    """After a short cache, when the chunk's keys count, and after a long one; both ways."""
    size, heads, n, bf16 = len(machines), 8, 240, torch.bfloat16
    if any(machines):  # however long the cache is
        monkeypatch.setattr(prefill, "keys_travel", lambda *_: tied or before == 64)

    def taken(ring: threads.ThreadRing) -> float:
        cache = RingCache(1, 2, 16, dtype=bf16, page=16, tied=tied, capacity=2304, group=ring)
        old, q = torch.randn(1, before, 2, 16).to(bf16), torch.randn(1, n // size, heads, 16)
        cache.append(old, None if tied else old)
        q, (chunk, held) = q.to(bf16), chunk_sizes(cache, heads, n)
        k, others = q[:, :, :2], before - cache.local_lengths[0]
        fetched = others if any(machines) and (tied or before == 64) else 0
        with Live() as live:
            ring_attn_with_cache(q, k, None if tied else k, cache, layout="zigzag")
        return live.most / chunk.memory(held, fetched, passes_spare(machines))

    found, _ = threads.run(size, taken, machines)
    assert 0.4 < max(found) <= 1


@pytest.mark.parametrize("what", ["_reserve", "append"])
def test_a_rank_that_alone_gets_no_memory_says_so(what: str, monkeypatch) -> None:
    reports: list[str] = []
    monkeypatch.setattr(Steps, "report_failure", lambda _, words: reports.append(words))

    def main(ring: threads.ThreadRing) -> None:
        cache = a_cache(ring)
        if ring.rank == 0:
            setattr(cache, what, mock.Mock(side_effect=RuntimeError("no memory")))
        ring_attn_with_cache(*Drawn.of(8).shard(ring, "zigzag"), cache, layout="zigzag")

    with pytest.raises(RuntimeError, match="no memory"):
        threads.run(2, main)
    assert any("no memory" in words for words in reports)


def test_a_chunk_without_room_is_refused_before_anything_is_sent() -> None:
    def refused(ring: threads.ThreadRing) -> int:
        cache = a_cache(ring, capacity=8)
        with pytest.raises(ValueError, match="would have 12 tokens, more than the capacity of 8"):
            ring_attn_with_cache(*Drawn.of(12).shard(ring, "zigzag"), cache, layout="zigzag")
        assert cache.lengths == [0]
        return ring.hub.sent_bytes[ring.rank]

    assert threads.run(2, refused)[0] == [0, 0]
