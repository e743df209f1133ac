"""Events after which ranks are out of step, on some rank of a ring."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.reference import dense_attention, relative_error

SIZE, OTHER = 4, 1  # ranks, and which of them does otherwise
Plans = tuple[RingPlan, RingPlan]


def shards(seed: int, rank: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 * seed + rank)
    return [torch.randn(1, 4, 2, 8, generator=draw).requires_grad_() for _ in range(3)]


def of(plan: RingPlan, seed: int) -> Callable[[], None]:
    """A layer: forward here and now, and backward when it is asked for; both are right."""
    mine, whole = shards(seed, plan.ring.rank), [shards(seed, rank) for rank in range(SIZE)]
    out = ring_attn(*mine, plan=plan)
    q, k, v = (torch.cat(t, dim=1) for t in zip(*whole))
    want, _ = dense_attention(q, k, v, causal=plan.visible.causal)
    own = whole[plan.ring.rank]
    check(plan, "out", out, want.chunk(SIZE, dim=1)[plan.ring.rank])

    def backward() -> None:
        grads = torch.autograd.grad(out.sum(), mine)
        for name, got, exact in zip("qkv", grads, torch.autograd.grad(want.sum(), own)):
            check(plan, f"d{name}", got, exact)

    return backward


def check(plan: RingPlan, name: str, got: Tensor, want: Tensor) -> None:
    assert relative_error(got, want) < 1e-5, f"wrong {name} on rank {plan.ring.rank}"


def skips_backward(ring: Ring, plans: Plans) -> None:
    backward = of(plans[0], 1)
    if ring.rank != OTHER:
        backward()
    of(plans[0], 2)()


def fails_in_forward_and_goes_on(ring: Ring, plans: Plans) -> None:
    """As where there is no memory, which is caught."""
    plan = plans[0]
    if ring.rank == OTHER:
        forward = plan.kernel.forward
        failing = plan.kernel._replace(forward=_no_memory)
        object.__setattr__(plan, "kernel", failing)
        with pytest.raises(MemoryError):
            of(plan, 1)
        object.__setattr__(plan, "kernel", failing._replace(forward=forward))
    else:
        of(plan, 1)
    of(plan, 2)


def _no_memory(*given: object) -> None:
    raise MemoryError


def recomputes_alone(ring: Ring, plans: Plans) -> None:
    """As checkpointing does, on one rank only."""
    backward = of(plans[0], 1)
    if ring.rank == OTHER:
        of(plans[0], 1)
    backward()


def calls_in_another_order(ring: Ring, plans: Plans) -> None:
    for plan in plans if ring.rank != OTHER else plans[::-1]:
        of(plan, 1)


def holds_another_plan(ring: Ring, plans: Plans) -> None:
    """Take a plan for the same shapes, but causal."""
    of(plans[ring.rank == OTHER], 1)()


EVENTS = {
    event.__name__: event
    for event in (
        skips_backward, fails_in_forward_and_goes_on, recomputes_alone, calls_in_another_order,
        holds_another_plan,
    )
}  # fmt: skip


def plans_of(ring: Ring, transport: str) -> Plans:
    q = torch.zeros(1, 4, 2, 8, requires_grad=True)
    first, second = (
        RingPlan.make(q, q, q, causal=causal, transport=transport, group=ring, kernel="eager")
        for causal in (False, True)
    )
    return first, second


@contextmanager
def little_patience() -> Iterator[None]:
    before, threads.PATIENCE = threads.PATIENCE, 1.0
    try:
        yield
    finally:
        threads.PATIENCE = before
