"""Decoding on GPUs: our kernels, CUDA graphs and shared memory, against dense attention."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import RingError, decoding, tree_attn_decode
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.inference import decode_plan
from ring_attention_pytorch.inference.attention import ring_attn_with_cache
from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.inference.explain import chunk_sizes
from ring_attention_pytorch.ranks.ring import Ring
from tests.support.cache_stories import OPTIONS, Story, told
from tests.support.decoding import Decoding
from tests.support.generation_cases import CASES, ROUTED
from tests.support.ranks import gpu_ranks
from tests.support.reference import dense_attention, relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
SIZES = sorted({2, 3, gpu_ranks()})
IN_8_BITS = torch.float8_e4m3fn
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
    found += [replace(BASE, dtype=dtype, kept=IN_8_BITS) for dtype in LIMITS]
    rolling = replace(
        BASE, dtype=torch.bfloat16, sequences=3, spare=9, deeds=(*BASE.deeds, "prefill")
    )
    found += [replace(rolling, page=page, windows=(20,), steps=60) for page in (3, 64)]
    return found


SOME = cases()[1::4]  # each compiles kernels of its own, which takes seconds


def check(stories: list[Story], errors: list[float]) -> None:
    for story, error in zip(stories, errors):
        assert error < LIMITS.get(story.dtype, 1e-12), story


@pytest.mark.parametrize("story", cases(), ids=str)  # a worker each, since most time compiles
def test_whatever_is_done_attention_is_dense(story: Story) -> None:
    check([story], told([story]))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("push", [False, True])
def test_on_several_ranks_too(nccl: Callable, size: int, push: bool) -> None:
    for errors in nccl(size).run(told_by, push):
        check(SOME, errors)


def of_chunks(window: int | None, layout: str) -> float:
    """The worst error of chunks that are spread over ranks, of heads as wide as cuDNN's."""
    draw, worst = torch.Generator().manual_seed(0), 0.0
    q, k, v = (torch.randn(1, 700, h, 64, generator=draw).bfloat16() for h in (4, 2, 2))
    cache = RingCache(1, 2, 64, page=16, dtype=q.dtype, device="cuda", windows=[window])
    want, _ = dense_attention(q.double(), k.double(), v.double(), causal=True, window=window)
    for start, stop in ((0, 256), (256, 512), (512, 700)):
        place = dict(rank=cache.ring.rank, ring_size=cache.ring.size, length=stop - start)
        mine = start + positions(layout, **place)
        shards = [t[:, mine].cuda() for t in (q, k, v)]
        out = ring_attn_with_cache(*shards, cache, layout=layout, window=window)
        worst = max(worst, relative_error(out.double().cpu(), want[:, mine]))
    return worst


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_chunks_over_ranks_are_dense(
    nccl: Callable, size: int, window: int | None, layout: str
) -> None:
    assert max(nccl(size).run(of_chunks, window, layout)) < LIMITS[torch.bfloat16]


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


SMALL = replace(CASES[1], call=dict(prefill_chunk_size=5, cache_dtype=IN_8_BITS))
GREEDY = [
    replace(case, dtype=torch.float32) for case in (*CASES[:4], SMALL, replace(ROUTED[0], call={}))
]


def generated(kernel: str | None) -> list[bool]:
    """Return whether greedy search on GPUs finds the tokens of a CPU."""
    found = []
    for case in GREEDY:
        mask = None if case.mask is None else case.mask.cuda()
        model = case.model(ring_attn=True).cuda()
        got = model.generate(case.prompt().cuda(), case.new, mask=mask, kernel=kernel, **case.call)
        if "cache_dtype" in case.call:  # which the oracle has not
            want = case.model().generate(case.prompt(), case.new, **case.call).tolist()
        else:
            want = case.anew()[0]
        found.append(got.tolist() == want)
    return found


@pytest.mark.parametrize("kernel", [None, "triton"])
def test_a_gpu_generates_what_a_cpu_does(kernel: str | None) -> None:
    assert all(generated(kernel))


@pytest.mark.parametrize("kernel", [None, "triton"])
def test_several_gpus_generate_what_a_cpu_does(nccl: Callable, kernel: str | None) -> None:
    for found in nccl(gpu_ranks()).run(generated, kernel):
        assert all(found)


# ---- keys that were given

TREES = [
    Decoding((70, 5, 3, 0, 1, 40, 2, 33), key_heads=2, dtype=torch.bfloat16),
    Decoding(
        (70, None, 0, 9, 1, None, 40, 6), masked="some", key_heads=1, tokens=3, dtype=torch.float32
    ),
    Decoding((9, 130, 4, 7, 1, 0, 2, 90), whole=True, masked="some", d_v=5, dtype=torch.float32),
]  # as many lengths as there may be ranks


def trees(push: bool) -> list[float]:
    """Errors of every way to attend to given keys, of which more come, as in decoding."""
    decode_plan.PUSH = push
    decoding._known.clear()  # plans that merge the other way
    ring, errors = Ring(), []
    for case, way in product(TREES, (None, True, False)):
        for more in (0, 1, 40):
            lengths = [m and m + more for m in case.lengths[: ring.size]]
            of = replace(case, lengths=tuple(lengths), device="cuda", use_triton=way)
            error = relative_error(of.got(ring.rank).cpu(), of.want())
            errors.append(error / LIMITS[case.dtype])
    return errors


def test_keys_that_are_given() -> None:
    assert max(trees(True)) < 1


@pytest.mark.parametrize("push", [False, True])
def test_keys_that_are_given_on_several_ranks(nccl: Callable, push: bool) -> None:
    for errors in nccl(gpu_ranks()).run(trees, push):
        assert max(errors) < 1


def tree_in_a_graph() -> dict[str, bool]:
    """Replay a graph of `tree_attn_decode`, with calls of other lengths in between."""
    decode_plan.PUSH = True
    (q,), (k,) = ([t.transpose(1, 2)] for t in (drawn(1, 1, 0)[0][0], drawn(1, 1, 1)[1][0]))
    k = k.repeat(1, 1, 90, 1) * torch.linspace(0, 2, 90).to(k).unsqueeze(1)
    call = partial(tree_attn_decode, q, shard_kv_seq=False)
    with pytest.raises(ValueError, match="run the same call once before"):
        captured(lambda: call(k, k))
    want, other = call(k, k), call(k[:, :, :20], k[:, :, :20])
    graph, out = captured(lambda: call(k, k))
    same = {}
    for turn in range(3):
        graph.replay()
        same[f"replay {turn}"] = torch.equal(out, want)
        same[f"call {turn}"] = torch.equal(call(k[:, :, :20], k[:, :, :20]), other)
    return same


def captured(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


def test_keys_that_are_given_in_a_graph() -> None:
    assert all(tree_in_a_graph().values())


def test_keys_that_are_given_in_a_graph_of_several_ranks(nccl: Callable) -> None:
    for same in nccl(gpu_ranks()).run(tree_in_a_graph):
        assert all(same.values()), same


def test_terms_of_any_dtype_and_place() -> None:
    """Our kernel is compiled for one dtype and alignment of sinks and slopes."""
    outs = []
    for kernel in ("eager", "triton"):
        cache, (q, k, v) = RingCache(2, 2, 64, dtype=torch.bfloat16, device="cuda"), drawn(2, 4, 2)
        terms = torch.arange(17.0, device="cuda")[1:] / 8
        for i, t in enumerate((terms[7:15], terms[:8], terms[::2], terms[:8].bfloat16())):
            options = dict(kernel=kernel, sinks=t, alibi_slopes=t)
            outs.append(ring_attn_with_cache(q[i], k[i], v[i], cache, **options).cpu())
    for want, got in zip(outs[:4], outs[4:]):
        assert relative_error(got, want) < LIMITS[torch.bfloat16]


# ---- graphs


def drawn(b: int, steps: int, seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shape = (steps, b, 1)
    return [torch.randn(*shape, h, 64, generator=draw).bfloat16().cuda() for h in (8, 2, 2)]


def in_a_graph(
    kept: torch.dtype = torch.bfloat16, window: int | None = None, b: int = 2, steps: int = 40
) -> dict[str, bool]:
    """Decode by replays of a graph, with a larger batch in between, beside calls one by one."""
    decode_plan.PUSH = True
    same = {}
    q, k, v = drawn(b, steps, 0)
    sizes: dict[str, Any] = dict(page=2, device="cuda", windows=[window], spare=8)
    mine = [RingCache(b, 2, 64, capacity=32, dtype=kept, **sizes) for _ in "12"]
    given = [t[0].clone() for t in (q, k, v)]
    ring_attn_with_cache(*given, mine[0], window=window)
    mine[0].rollback(1)
    pool = mine[0].keys[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ring_attn_with_cache(*given, mine[0], window=window)
    more = RingCache(3 * b, 2, 64, page=2, dtype=q.dtype, device="cuda")
    capacity = mine[0].capacity
    for i in range(steps):
        for place, t in zip(given, (q[i], k[i], v[i])):
            place.copy_(t)
        graph.replay()
        if i < capacity:
            want = ring_attn_with_cache(q[i], k[i], v[i], mine[1], window=window)
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
    mine[0].reorder([*range(1, b), 0])
    graph.replay()
    same["after beams"] = mine[0].lengths == [capacity - 3] * b
    same["the memory"] = mine[0].keys[0] is pool
    return same


@pytest.mark.parametrize(("kept", "window"), [(torch.bfloat16, None), (IN_8_BITS, 6)])
def test_graphs_append_and_advance(kept: torch.dtype, window: int | None) -> None:
    assert all(in_a_graph(kept, window).values()), in_a_graph(kept, window)


def test_graphs_of_several_ranks(nccl: Callable) -> None:
    for same in nccl(gpu_ranks()).run(in_a_graph):
        assert all(same.values()), same


@mock.patch.dict(os.environ, RING_ATTENTION_CHECK="")  # by "always" all hear of it before the call
def out_of_step(deed: str, way: str) -> tuple[list[bool], str]:
    """Decode, and once more after rank 1 did something to its cache: which is NaN, and the error.

    `way` is by replays of a graph, by calls, or by calls that send messages.
    """
    decode_plan.PUSH = way != "messages"
    cache = RingCache(2, 2, 64, capacity=32, page=2, dtype=torch.bfloat16, device="cuda")
    given = [t[0] for t in drawn(2, 1, 0)]
    out, nan, text = ring_attn_with_cache(*given, cache), [], "no error"
    if way == "replays":
        cache.rollback(1)
        graph, out = captured(lambda: ring_attn_with_cache(*given, cache))
    for step in range(3):
        if step == 2 and Ring().rank == 1:
            DEEDS[deed](cache)
        if way == "replays":
            graph.replay()
        else:
            out = ring_attn_with_cache(*given, cache)
        nan.append(bool(out.isnan().all()))
    try:
        ring_attn_with_cache(*given, cache)
    except RingError as error:
        text = str(error)
    decode_plan.PUSH = True
    return nan, text


DEEDS: dict[str, Callable[[RingCache], object]] = {
    "rollback": lambda cache: cache.rollback([0, 1]),
    "reorder": lambda cache: cache.reorder([1, 0]),
    "hide_before": lambda cache: cache._pad([1, 0]),
}


@pytest.mark.parametrize("way", ["replays", "calls", "messages"])
@pytest.mark.parametrize("deed", DEEDS)
def test_a_rank_whose_cache_has_other_sequences_is_found(
    nccl: Callable, deed: str, way: str
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("ranks of one GPU share no memory, and don't send by NCCL")
    said = "for another call" if way == "messages" else "other lengths, order or padding"
    for nan, text in nccl(gpu_ranks()).run(out_of_step, deed, way):
        assert nan == [False, False, True]
        assert said in text


def push(tokens: int) -> tuple[bool, bool]:
    """Return whether memory is shared, and whether ranks have the same out, bit by bit."""
    decode_plan.PUSH = True
    q, k, v = drawn(1, tokens, 1)
    cache = RingCache(1, 2, 64, page=1, dtype=q.dtype, device="cuda")
    outs = torch.stack([ring_attn_with_cache(*each, cache) for each in zip(q, k, v)])
    plan = next(iter(cache.plans.values()))
    most, least = outs.clone(), outs.clone()
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    return plan.pushed is not None, torch.equal(most, least)


def test_ranks_have_the_same_result(nccl: Callable) -> None:
    shared, same = zip(*nccl(gpu_ranks()).run(push, 50))
    assert all(same)
    assert all(shared) or torch.cuda.device_count() < 2
