"""Tensors whose memory does not hold their values: what kernels read of them is right."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor

from ring_attention_pytorch import RingCache, RingPlan, ring_attn, ring_attn_with_cache
from ring_attention_pytorch.comm.ulysses import QKV_TO_HEADS, Ulysses
from ring_attention_pytorch.ranks.ring import Ring
from tests.support.interpreter import needs_triton
from tests.support.lazy import LAZY, kernels_by_address, negative, unwaited
from tests.support.random_cases import problem
from tests.support.random_draw import Case
from tests.support.reference import dense_attention, relative_error

BASE = Case(
    seed=3, size=2, length=11, heads=4, key_heads=2, d=8, d_v=8, dtype="float32", causal=True,
    layout="zigzag", kernel="eager", sinks=True, lse="differentiated",
)  # fmt: skip
KINDS = {
    "a ring": replace(BASE, transport="ring", bias="keys"),
    "heads swapped": replace(BASE, ulysses=2, kernel="sdpa"),
    "shared memory": replace(BASE, transport="shared", alibi=True),
    "a plan": replace(BASE, size=1, plan="made"),
    "decoding": Case(queries=(2,), keys=(9,), decode=True, learned=(), masked="some"),
}


def lazy(case: Case, kind: str) -> Case:
    """With all tensors of that kind."""
    names = [name for name, t in case.tensors().items() if t.is_floating_point()]
    return replace(case, lazy=tuple((name, kind) for name in names))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kind", LAZY)
def test_what_memory_does_not_hold_is_resolved(name: str, kind: str) -> None:
    assert not problem(lazy(KINDS[name], kind))


@needs_triton
def test_triton_reads_what_is_meant(interpreted: ProcessPoolExecutor) -> None:
    case = replace(BASE, size=1, kernel="triton", alibi=True)
    found = [interpreted.submit(problem, lazy(case, kind)) for kind in LAZY]
    assert not any(each.result() for each in found)


def of_a_cache(kernel: str) -> dict[str, float]:
    """Errors of attention to a cache by tensors of each kind, its keys appended or given."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 6, 4, 8), torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 8)
    sinks, slopes = torch.randn(2, 4)
    found = {}
    for kind, make in {"plain": Tensor.clone, **LAZY}.items():
        cache = RingCache(1, key_heads=2, head_dim=8, page=4, capacity=16)
        cache.append(make(k[:, :2]), make(v[:, :2]))
        new = [make(t[:, 2:]) for t in (q, k, v)]
        terms = dict(sinks=make(sinks), alibi_slopes=make(slopes))
        found[kind] = ring_attn_with_cache(*new, cache, **terms, kernel=kernel)
    return {kind: (out - found["plain"]).abs().max().item() for kind, out in found.items()}


@needs_triton
@pytest.mark.parametrize("kernel", ["eager", "triton"])
def test_a_cache_takes_and_is_asked_what_is_meant(
    interpreted: ProcessPoolExecutor, kernel: str
) -> None:
    assert set(interpreted.submit(of_a_cache, kernel).result().values()) == {0.0}


def test_a_swap_of_heads_is_given_what_its_graph_may_read() -> None:
    """By address, where there are graphs: forward and backward alike."""
    given: list[Tensor] = []
    swap = RingPlan.make(*[torch.randn(1, 4, 2, 4)] * 3, group=Ring.alone())
    way = replace(QKV_TO_HEADS)

    class Recorded:
        def run(self, way: object, ranks: object, *tensors: Tensor) -> tuple[Tensor, ...]:
            given.extend(tensors)
            return tensors

    ranks = object.__new__(Ulysses)
    for name, value in dict(tapes=Recorded(), together=swap.ring, number=0).items():
        object.__setattr__(ranks, name, value)
    x = [make(torch.randn(1, 4, 2, 4)) for make in (negative, unwaited, torch.clone)]
    Ulysses.exchange(ranks, way, *x, back_of=None)
    assert [type(t) for t in given] == [Tensor] * 3
    assert not any(t.is_neg() for t in given)
    assert all(torch.equal(a, b) for a, b in zip(given, x))


def by_collectives() -> list[float]:
    """Errors of attention of what functional collectives and DTensors return, over two ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    whole = [torch.randn(1, 12, h, 8) for h in (4, 2, 2)]
    rank, errors = dist.get_rank(), []
    want = dense_attention(*(t.double() for t in whole), causal=True)[0]
    mine = [t.chunk(2, dim=1)[rank] for t in whole]
    mesh = init_device_mesh("cpu", (2,))
    with kernels_by_address():
        # each rank brings its own half of what it gets, and zeros for the other
        brought = [torch.stack([t * (place == rank) for place in range(2)]) for t in mine]
        given = [collectives.all_reduce(t, "sum", mesh)[rank] for t in brought]
        assert all(isinstance(t, collectives.AsyncCollectiveTensor) for t in given)
        out = ring_attn(*given, causal=True, kernel="eager")
        assert type(out) is Tensor
        errors.append(relative_error(out, want.chunk(2, dim=1)[rank]))
        spread = [
            distribute_tensor(t, mesh, [Shard(2)]).redistribute(mesh, [Shard(1)], async_op=True)
            for t in whole
        ]
        out = ring_attn(*spread, causal=True, kernel="eager").to_local()
        errors.append(relative_error(out, want.chunk(2, dim=1)[rank]))
    return errors


def test_nobody_need_wait_for_a_collective(pools: Callable) -> None:
    assert max(map(max, pools(2).run(by_collectives))) < 1e-5
