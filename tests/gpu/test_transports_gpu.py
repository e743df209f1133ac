"""Rings of GPUs: every transport and Ulysses degree, over NCCL and shared memory, under torchrun.

With the kernel in plain PyTorch, which repeats to the bit: what is tested is what travels.

`torchrun --standalone --nproc-per-node 4 -m tests.gpu.test_transports_gpu` runs
the same by hand and prints the worst errors; `few` behind it runs that part alone.
"""

import os
import random
import sys
from collections.abc import Callable
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attention_pytorch import RingPlan, explain_plan, positions, ring_attn
from ring_attention_pytorch.comm.fabric_kernels import OneStream
from ring_attention_pytorch.comm.symmetric_memory import shared_by
from ring_attention_pytorch.ranks.ring import Ring
from tests.support.gpu_rings import BOUNDS, FEW, PARTS, WAYS, able_of, plan_for, say, wanted, whole
from tests.support.late_streams import delays
from tests.support.ranks import gpu_ranks
from tests.support.reference import relative_error
from tests.support.torchrun import join_ranks, under_torchrun


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("part", PARTS)
def test_rings_of_gpus(part: str) -> None:
    under_torchrun("tests.gpu.test_transports_gpu", gpu_ranks(), part)


def replayed(run: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """Replay the call as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = run()

    def replay() -> list[Tensor]:
        for t in result:
            t.fill_(torch.nan)
        graph.replay()
        return result

    return replay


def one(
    length: int, batch: int, dtype: torch.dtype, causal: bool, masked: bool, how: dict
) -> float:
    """The worst relative error on this rank; repeats must be equal in every bit, be they graphs
    or late."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), torch.cuda.current_device()
    layout = "zigzag" if causal else "striped"
    q, k, v, dout = whole(length, batch, dtype)
    mask = torch.arange(length).expand(batch, length) % 5 != 1 if masked else None
    whole_mask = None if mask is None else mask.to(device)
    wants = wanted([q, k, v], dout, causal=causal, key_mask=whole_mask)
    at = positions(layout, rank=rank, ring_size=size, length=length)
    mine = [t[:, at].to(device).requires_grad_() for t in (q, k, v)]
    key_mask = None if mask is None else mask[:, at].to(device)
    plan = plan_for(*mine, causal=causal, layout=layout, key_mask=key_mask, kernel="eager", **how)
    others = (d for d in range(torch.cuda.device_count()) if d != device)
    shared = all(torch.cuda.can_device_access_peer(device, d) for d in others)
    if plan.chosen.name == "gather" and shared:
        assert bool(plan.transport.fabric.name) != how.get("apart", False)
        others = len(plan.blocks.keys) > 1
        assert isinstance(plan.transport.fabric, OneStream) == (others and how.get("few", False))

    def run() -> list[Tensor]:
        out = ring_attn(*mine, plan=plan)
        return [out.detach(), *torch.autograd.grad(out, mine, cotangent)]

    cotangent = dout[:, at].to(device)
    replay, first = None, None
    for turn in range(8):
        got = replay() if turn % 4 == 2 else run()
        replay = replay or replayed(run)
        first = first or got
        assert all(torch.equal(a, b) for a, b in zip(first, got)), (how, turn, "not repeated")
    kept = [] if plan.tapes is None else plan.tapes.by_kind.values()
    assert any(known.replay for known in kept) == plan.transport.fabric.taped, (
        "what can be taped is"
    )
    with delays():
        for turn in range(4):
            assert all(map(torch.equal, first, run())), (how, turn, "too early")
    return max(relative_error(g, w[:, at.to(device)]) for g, w in zip(first, wants))


def five_hundred(how: dict) -> None:
    """Repeat a call 500 times, to the bit, each begun once the last one is launched."""
    rank, device = dist.get_rank(), torch.cuda.current_device()
    q, k, v, dout = (t[:, rank * 64 : rank * 64 + 64].to(device) for t in whole(512, 1, torch.half))
    plan = plan_for(q, k, v, causal=True, layout="zigzag", kernel="eager", **how)
    mine = [t.requires_grad_() for t in (q, k, v)]
    first, same = None, []
    for _ in range(500):
        out = ring_attn(*mine, plan=plan)
        got = [out.detach(), *torch.autograd.grad(out, mine, dout)]
        first = first or got
        same += [(a == b).all() for a, b in zip(first, got)]
    assert torch.stack(same).all(), (how, "not repeated")


def calls_side_by_side(kernel: str, how: dict) -> float:
    """The worst relative error of calls that follow one another at once, with other tensors each.

    So what is read too early, or overwritten too early, is that of others.
    """
    rank, size, device = dist.get_rank(), dist.get_world_size(), torch.cuda.current_device()
    length, errors = 512 * size, []
    at = positions("zigzag", rank=rank, ring_size=size, length=length)
    problems = []
    for seed in range(3):
        given = [t.roll(seed, 1).to(device) for t in whole(length, 1, torch.bfloat16)]
        wants = wanted(given[:3], given[3], causal=True)
        mine = [t[:, at].clone() for t in given]
        problems.append(
            ([t.requires_grad_() for t in mine[:3]], mine[3], [w[:, at] for w in wants])
        )
    plan = plan_for(*problems[0][0], causal=True, layout="zigzag", kernel=kernel, **how)

    def run(i: int) -> list[Tensor]:
        mine, cotangent, _ = problems[i]
        out = ring_attn(*mine, plan=plan)
        return [out.detach(), *torch.autograd.grad(out, mine, cotangent)]

    run(0)  # what kernels keep can't be made while a graph is captured
    with delays():
        runs = [replayed(lambda i=i: run(i)) for i in range(3)]
        for turn in range(24):
            i = turn % 3
            got = [t.clone() for t in (runs[i]() if turn % 4 == 3 else run(i))]
            for t in got:
                torch.full_like(t, torch.nan)  # of the current stream's memory, freed at once
            errors.append((got, problems[i][2]))
    return max(relative_error(g, w) for got, wants in errors for g, w in zip(got, wants))


def new_memory_may_be_filled(kernels: list[str]) -> None:
    """With NaN, as PyTorch does it under deterministic algorithms."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    for kernel, how in product(able_of(kernels)[:1], WAYS[-2:]):
        assert calls_side_by_side(kernel, how) < BOUNDS[torch.bfloat16], (kernel, how, "filled")
    torch.use_deterministic_algorithms(False)


def only_the_last_has_keys(kernel: str, few: bool) -> float:
    """The worst relative error of cross attention where the other ranks compute on others' only."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), torch.cuda.current_device()
    q, k, v, dout = (t.to(device) for t in whole(512, 1, torch.bfloat16))
    wants = wanted([q, k, v], dout, causal=False)
    rows = [t.tensor_split(size, dim=1)[rank] for t in (q, dout, *wants[:2])]
    held = slice(0, 512 if rank == size - 1 else 0)
    mine = [t.clone().requires_grad_() for t in (rows[0], k[:, held], v[:, held])]
    plan = plan_for(*mine, cross=True, kernel=kernel, transport="gather", few=few)
    with delays():
        for _ in range(4):
            out = ring_attn(*mine, plan=plan)
            got = [out.detach(), *torch.autograd.grad(out, mine, rows[1])]
    there = [*rows[2:], *(t[:, held] for t in wants[2:])]
    return max(relative_error(g, w) for g, w in zip(got, there))


def other_heads_and_documents(kernel: str, few: bool) -> float:
    """The worst relative error of other numbers of key heads, and of documents.

    Kernels that make others' gradients where they are told write them between others there.
    """
    rank, size, device = dist.get_rank(), dist.get_world_size(), torch.cuda.current_device()
    at, errors = positions("zigzag", rank=rank, ring_size=size, length=1024), []
    for key_heads, ids in product((1, 2, 8), (None, torch.arange(1024)[None] // 100)):
        *given, dout = whole(1024, 1, torch.bfloat16, key_heads)
        documents = None if ids is None else ids.to(device)
        wants = wanted(given, dout, causal=True, documents=documents)
        mine = [t[:, at].to(device).requires_grad_() for t in given]
        plan = plan_for(
            *mine, causal=True, layout="zigzag", kernel=kernel, transport="gather", few=few,
            documents=None if ids is None else documents[:, at],
        )  # fmt: skip
        out = ring_attn(*mine, plan=plan)
        got = [out.detach(), *torch.autograd.grad(out, mine, dout[:, at].to(device))]
        errors += [relative_error(g, w[:, at]) for g, w in zip(got, wants)]
    return max(errors)


def small(
    ulysses: int = 1, kernel: str = "eager"
) -> tuple[Callable[[], list[Tensor]], list[Tensor]]:
    """A gather of few tokens, and what it gives."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), torch.cuda.current_device()
    shards = (t.tensor_split(size, dim=1)[rank] for t in whole(512, 1, torch.bfloat16))
    q, k, v, dout = (t.to(device) for t in shards)
    mine = [t.requires_grad_() for t in (q, k, v)]
    plan = RingPlan.make(*mine, causal=True, kernel=kernel, transport="gather", ulysses=ulysses)

    def run() -> list[Tensor]:
        out = ring_attn(*mine, plan=plan)
        return [out.detach(), *torch.autograd.grad(out, mine, dout)]

    return run, run()


def graphs_outlive_larger_buffers(ulysses: int) -> None:
    run, want = small(ulysses)
    replay = replayed(run)
    size, device = dist.get_world_size(), torch.cuda.current_device()
    q = torch.randn(1, 2**16 // size, 8, 64, device=device, dtype=torch.bfloat16)
    mine = [t.requires_grad_() for t in (q, q[:, :, :2].clone(), q[:, :, :2].clone())]
    for _ in range(2):
        ring_attn(*mine, causal=True, transport="gather", ulysses=ulysses).sum().backward()
        assert all(map(torch.equal, want, replay())), "not what was captured"


def training_follows_inference() -> None:
    """Memory kept between calls can be written, whatever mode it was made in."""
    size, device = dist.get_world_size(), torch.cuda.current_device()
    q = torch.randn(1, 2**17 // size, 4, 64, device=device, dtype=torch.bfloat16)
    with torch.inference_mode():
        want = ring_attn(q, q, q, causal=True, transport="gather", layout="contiguous")
    mine = [q.clone().requires_grad_() for _ in range(3)]
    out = ring_attn(*mine, causal=True, transport="gather", layout="contiguous")
    out.sum().backward()
    assert torch.equal(out, want), "otherwise in inference"


def parts_of_a_projection(kernel: str, ulysses: int) -> None:
    """q, k and v that lie in one tensor, and a cotangent that is one number: strided, all.

    They give what copies give that lie by themselves.
    """
    rank, size, device = dist.get_rank(), dist.get_world_size(), torch.cuda.current_device()
    draw, widths = torch.Generator(device).manual_seed(rank), (8, 2, 2)
    fused = torch.randn(2, 512 // size, 12, 64, device=device, generator=draw).bfloat16()
    plan = RingPlan.make(
        *fused.split(widths, dim=2), causal=True, layout="zigzag", kernel=kernel,
        transport="gather", ulysses=ulysses,
    )  # fmt: skip
    mine = [t.contiguous().requires_grad_() for t in fused.split(widths, dim=2)]
    out = ring_attn(*mine, plan=plan)
    grads = torch.autograd.grad(out, mine, torch.ones_like(out))
    want = [out.detach(), torch.cat(grads, dim=2)]
    for _ in range(5):
        leaf = fused.clone().requires_grad_()
        out = ring_attn(*leaf.split(widths, dim=2), plan=plan)
        out.sum().backward()
        assert same(want, [out.detach(), leaf.grad], kernel), (kernel, ulysses, "strided")


def same(want: list[Tensor], got: list[Tensor], kernel: str) -> bool:
    """To the bit, where this kernel repeats so."""
    if kernel == "eager":
        return all(map(torch.equal, want, got))
    return max(map(relative_error, got, want)) < BOUNDS[torch.bfloat16]


def any_device_may_be_current(kernel: str) -> None:
    """Where buffers are made that are larger than those before, too."""
    run, want = small(kernel=kernel)
    here = torch.cuda.current_device()
    other = (here + 1) % torch.cuda.device_count()
    with torch.cuda.device(other):
        got = [run() for _ in range(3)][-1]
        shared = shared_by(Ring(), torch.device("cuda", here))
        for _ in range(2):
            wanted = {n: getattr(shared.space, n).nbytes + (1 << 20) for n in ("keys", "grads")}
            shared.space.reserve(shared.group, **wanted)
        got = run()
        assert torch.cuda.current_device() == other
    assert torch.cuda.current_device() == here
    assert same(want, got, kernel), (kernel, "on another device")


def any_stream_may_be_current(ulysses: int, kernel: str) -> None:
    """One call after the other, on streams that don't wait for one another."""
    run, want = small(ulysses, kernel)
    streams, got = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    with delays():
        for turn in range(12):
            with torch.cuda.stream(streams[turn % 2]):
                got.append(run())
    torch.cuda.synchronize()
    for again in got:
        assert same(want, again, kernel), (kernel, "on another stream")


def speeds() -> str:
    """Plans choose by constants of the device, the same on all ranks."""
    q = torch.randn(1, 1024, 8, 64, device=torch.cuda.current_device(), dtype=torch.bfloat16)
    plan = RingPlan.make(q, q, q, causal=True, layout="zigzag")
    assert plan.chosen.machine.device in torch.cuda.get_device_name()
    assert plan.chosen.machine.domain == dist.get_world_size()
    told = [""] * dist.get_world_size()
    dist.all_gather_object(told, str(plan.chosen.machine))
    assert len({*told}) == 1, told
    return f"{plan.chosen.machine}\n{explain_plan(plan)}"


def in_each_dtype(ways: list[dict]) -> None:
    """Each way in every dtype, and over and over."""
    for dtype, how in product(BOUNDS, ways):
        worst = 0.0
        for length, batch, causal, masked in (
            (1024, 1, True, False), (517, 2, True, False), (1024, 1, False, False),
            (517, 2, True, True), (4096, 1, True, False), (7, 1, True, False),
        ):  # fmt: skip
            error = one(length, batch, dtype, causal, masked, how)
            assert error < BOUNDS[dtype], (how, dtype, length, batch, causal, masked, error)
            worst = max(worst, error)
        say(how, dtype, f"{worst:.1e}")
    for how in ways:
        five_hundred(how)


def every_way_is_checked() -> None:
    """With ranks that compare notes in each call, while graphs are captured, too."""
    with mock.patch.dict(os.environ, RING_ATTENTION_CHECK="always"):
        for how in WAYS + FEW:
            error = one(517, 1, torch.bfloat16, True, False, how)
            assert error < BOUNDS[torch.bfloat16], (how, "checked", error)
    say("checked in each call")


def every_kernel(kernels: list[str]) -> None:
    """Try kernels that return parts, side by side, and those told where to put gradients."""
    for kernel in kernels:
        ways = (*WAYS[1:4], WAYS[5], *WAYS[-2:], *FEW)
        errors = [calls_side_by_side(kernel, how) for how in ways]
        errors += [only_the_last_has_keys(kernel, few) for few in (False, True)]
        assert max(errors) < BOUNDS[torch.bfloat16], (kernel, errors)
        say(kernel, "side by side", [f"{e:.1e}" for e in errors])
    for kernel in (*kernels, "triton"):
        error = max(other_heads_and_documents(kernel, few) for few in (False, True))
        assert error < BOUNDS[torch.bfloat16], (kernel, "other heads", error)
    new_memory_may_be_filled([*kernels, "triton"])


def surroundings(able: list[str]) -> None:
    """Graphs, streams, devices and strides around calls."""
    for ulysses in (1, 2):
        graphs_outlive_larger_buffers(ulysses)
        for kernel in ("eager", *able[:1]):
            any_stream_may_be_current(ulysses, kernel)
    for kernel in ("eager", *able):
        any_device_may_be_current(kernel)
    for kernel, ulysses in product(("eager", *able), (1, 2)):
        parts_of_a_projection(kernel, ulysses)
    training_follows_inference()
    say(speeds())


def main() -> None:
    join_ranks()
    random.seed(dist.get_rank())
    able = able_of(["flash-attn-4", "sdpa-cudnn", "flash-attn-2", "sdpa-flash"])
    parts = dict(
        few=lambda: in_each_dtype(FEW),
        ways=lambda: in_each_dtype(WAYS),
        checks=every_way_is_checked,
        kernels=lambda: every_kernel(able),
        surroundings=lambda: surroundings(able),
    )
    for part in sys.argv[1:] or PARTS:
        parts[part]()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
