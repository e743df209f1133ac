"""Decoding on GPUs: our kernels, CUDA graphs and shared memory, against dense attention."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch.comm.ring import Ring
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.inference import decode_plan
from ring_attention_pytorch.inference.attention import ring_attn_with_cache
from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.inference.explain import chunk_sizes
from tests.inference.stories import Story, told
from tests.inference.test_cache import OPTIONS
from tests.nn.generation_cases import CASES, ROUTED
from tests.support.reference import dense_attention, relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
BASE = Story(device="cuda", steps=30, most=9, page=16, kernel="triton")


def cases() -> list[Story]:
    found = [replace(BASE, page=page, dtype=torch.bfloat16) for page in (1, 16, 64, 256)]
    found += [replace(BASE, dtype=dtype, most=70) for dtype in LIMITS]
    found += [replace(BASE, dtype=torch.float32, page=2, **each) for each in OPTIONS]
    found += [
        replace(BASE, seed=seed, dtype=torch.float32, sequences=3, layers=2, page=2)
        for seed in range(4)
    ]
    found += [replace(BASE, dtype=torch.float32, capacity=40)]
    found += [replace(BASE, dtype=torch.float64, kernel=None)]
    return found


SOME = cases()[1::4]  # each compiles kernels of its own, which takes seconds


def check(stories: list[Story], errors: list[float]) -> None:
    for story, error in zip(stories, errors):
        assert error < LIMITS.get(story.dtype, 1e-12), story


@pytest.mark.parametrize("story", cases(), ids=str)  # a worker each, since most time compiles
def test_whatever_is_done_attention_is_dense(story: Story) -> None:
    check([story], told([story]))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("push", [False, True])
def test_on_several_ranks_too(nccl: Callable, size: int, push: bool) -> None:
    for errors in nccl(size).run(told_by, push):
        check(SOME, errors)


def of_chunks() -> float:
    """The worst error of chunks that are spread over ranks, of heads as wide as cuDNN's."""
    draw, worst = torch.Generator().manual_seed(0), 0.0
    q, k, v = (torch.randn(1, 700, h, 64, generator=draw).bfloat16() for h in (4, 2, 2))
    cache = RingCache(1, 2, 64, page=16, dtype=q.dtype, device="cuda")
    want, _ = dense_attention(q.double(), k.double(), v.double(), causal=True)
    for start, stop in ((0, 256), (256, 512), (512, 700)):
        place = dict(rank=cache.ring.rank, ring_size=cache.ring.size, length=stop - start)
        mine = start + positions("zigzag", **place)
        shards = [t[:, mine].cuda() for t in (q, k, v)]
        out = ring_attn_with_cache(*shards, cache, layout="zigzag")
        worst = max(worst, relative_error(out.double().cpu(), want[:, mine]))
    return worst


@pytest.mark.parametrize("size", [2, 3])
def test_chunks_over_ranks_are_dense(nccl: Callable, size: int) -> None:
    assert max(nccl(size).run(of_chunks)) < LIMITS[torch.bfloat16]


def chunk_memory() -> tuple[int, int]:
    """The bytes that a chunk after 16k tokens takes beside the cache, and those planned."""
    sizes: dict = dict(dtype=torch.bfloat16, device="cuda")
    cache = RingCache(1, 4, 128, capacity=18432, **sizes)
    kv = torch.randn(1, 16384, 4, 128, **sizes)
    q = torch.randn(1, 2048 // cache.ring.size, 16, 128, **sizes)
    for _ in range(2):  # the first makes what stays
        cache.free(0)
        cache.append(kv, kv)
        chunk, held = chunk_sizes(cache, 16, 2048)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ring_attn_with_cache(q, *[q[:, :, :4]] * 2, cache, layout="zigzag")
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, chunk.memory(held)


def test_a_chunk_takes_the_memory_that_was_planned(nccl: Callable) -> None:
    for taken, planned in nccl(2).run(chunk_memory):
        assert 0.6 * planned < taken <= planned


def told_by(push: bool) -> list[float]:
    decode_plan.PUSH = push
    return told(SOME)


GREEDY = [replace(case, dtype=torch.float32) for case in (*CASES[:4], replace(ROUTED[0], call={}))]


def generated(kernel: str | None) -> list[bool]:
    """Whether greedy search on GPUs finds the tokens of a CPU."""
    found = []
    for case in GREEDY:
        mask = None if case.mask is None else case.mask.cuda()
        model = case.model(ring_attn=True).cuda()
        got = model.generate(case.prompt().cuda(), case.new, mask=mask, kernel=kernel, **case.call)
        found.append(got.tolist() == case.anew()[0])
    return found


@pytest.mark.parametrize("kernel", [None, "triton"])
def test_a_gpu_generates_what_a_cpu_does(kernel: str | None) -> None:
    assert all(generated(kernel))


@pytest.mark.parametrize("kernel", [None, "triton"])
def test_several_gpus_generate_what_a_cpu_does(nccl: Callable, kernel: str | None) -> None:
    for found in nccl(2).run(generated, kernel):
        assert all(found)


def drawn(b: int, steps: int, seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shape = (steps, b, 1)
    return [torch.randn(*shape, h, 64, generator=draw).bfloat16().cuda() for h in (8, 2, 2)]


def in_a_graph(b: int = 2, steps: int = 40) -> dict[str, bool]:
    """Decode by replays of a graph, with a larger batch in between, beside calls one by one."""
    decode_plan.PUSH = True
    same = {}
    q, k, v = drawn(b, steps, 0)
    mine = [RingCache(b, 2, 64, capacity=32, page=2, dtype=q.dtype, device="cuda") for _ in "12"]
    given = [t[0].clone() for t in (q, k, v)]
    ring_attn_with_cache(*given, mine[0])
    mine[0].rollback(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ring_attn_with_cache(*given, mine[0])
    more = RingCache(3 * b, 2, 64, page=2, dtype=q.dtype, device="cuda")
    capacity = mine[0].capacity
    for i in range(steps):
        for place, t in zip(given, (q[i], k[i], v[i])):
            place.copy_(t)
        graph.replay()
        if i < capacity:
            want = ring_attn_with_cache(q[i], k[i], v[i], mine[1])
            same[f"token {i}"] = torch.equal(out, want)
        else:
            same[f"token {i} is refused"] = bool(out.isnan().all())
        large = [torch.cat([t[i]] * 3) for t in (q, k, v)]
        ring_attn_with_cache(*large, more)
    with pytest.raises(ValueError, match="appended beyond the capacity"):
        _ = mine[0].lengths
    same["lengths"] = mine[0].lengths == [capacity] * b
    mine[0].rollback(5)
    graph.replay()
    same["after a rollback"] = mine[0].lengths == [capacity - 4] * b
    return same


def test_graphs_append_and_advance() -> None:
    assert all(in_a_graph().values()), in_a_graph()


def test_graphs_of_several_ranks(nccl: Callable) -> None:
    for same in nccl(2).run(in_a_graph):
        assert all(same.values()), same


def push(tokens: int) -> tuple[bool, bool]:
    """Whether memory is shared, and whether ranks have the same out, bit by bit."""
    decode_plan.PUSH = True
    ring, (q, k, v) = Ring(), drawn(1, tokens, 1)
    cache = RingCache(1, 2, 64, page=1, dtype=q.dtype, device="cuda")
    outs = torch.stack([ring_attn_with_cache(*each, cache) for each in zip(q, k, v)])
    (plan,) = cache.plans.values()
    theirs = [t.clone() for t in (outs, outs)]
    ring.largest(theirs[0])
    theirs[1].neg_()
    ring.largest(theirs[1])
    return plan.pushed is not None, torch.equal(theirs[0], -theirs[1])


def test_ranks_have_the_same_result(nccl: Callable) -> None:
    shared, same = zip(*nccl(2).run(push, 50))
    assert all(same)
    assert all(shared) or torch.cuda.device_count() < 2
