"""DTensors, tensors without values, and tensors with heads first."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ring_attention_pytorch import (
    RingAttention,
    RingCache,
    RingPlan,
    ring_attn,
    ring_attn_with_cache,
    ring_cross_entropy,
    shard_batch,
    shard_sequence,
    tree_attn_decode,
)
from ring_attention_pytorch.ranks.ring import Ring
from tests.support.reference import relative_error
from tests.support.telling import said


def drawn(n: int, **kinds: Any) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, h, 8, generator=draw, **kinds) for h in (4, 2, 2)]


def differentiated(given: list[Tensor], **options: Any) -> list[Tensor]:
    """Return out and lse, and the gradients of a sum of both."""
    leaves = [t.requires_grad_() for t in given]
    out, lse = ring_attn(*leaves, causal=True, return_lse=True, **options)
    return [out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), leaves)]


def of_dtensors(shape: tuple[int, ...], n: int, heads_first: bool, planned: bool) -> float:
    """Return the worst error of DTensors against one process; by a mesh of (dp, cp), or (cp,)."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp")[-len(shape) :])
    whole = drawn(n, dtype=torch.float64)
    want = differentiated([t.clone() for t in whole], group=Ring.alone())
    along = 2 if heads_first else 1
    placements = [Shard(0), Shard(along)][-len(shape) :]
    given = [t.transpose(1, 2).contiguous() if heads_first else t for t in whole]
    given = [distribute_tensor(t, mesh, placements) for t in given]
    options: dict[str, Any] = dict(heads_first=heads_first)
    if planned:
        local = [t.to_local().requires_grad_() for t in given]
        plan = RingPlan.make(*local, causal=True, group=mesh["cp"])
        leaves = [t.requires_grad_() for t in given]
        out, lse = ring_attn(*leaves, plan=plan, return_lse=True, **options)
        got = [out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), leaves)]
    else:
        got = differentiated(given, **options)
    assert all(isinstance(t, DTensor) for t in got)
    if heads_first:
        got = [t if t.ndim == 3 else t.transpose(1, 2) for t in got]
    return max(relative_error(a.full_tensor(), b) for a, b in zip(got, want))


@pytest.mark.parametrize(
    ("shape", "n", "heads_first", "planned"),
    [((2,), 7, False, False), ((2,), 8, True, False), ((2, 2), 8, False, False)]
    + [((2,), 8, False, True)],
)
def test_dtensors_come_out_as_dtensors(pools, shape, n, heads_first, planned):
    size = 4 if len(shape) == 2 else 2
    for worst in pools(size).run(of_dtensors, shape, n, heads_first, planned):
        assert worst < 1e-14


def refused() -> list[str]:
    """Return what is said of DTensors that lie otherwise."""
    mesh = init_device_mesh("cpu", (2,))
    whole = drawn(8)
    calls = [[distribute_tensor(t, mesh, [how]) for t in whole] for how in (Replicate(), Shard(2))]
    calls.append([distribute_tensor(whole[0], mesh, [Shard(1)]), *whole[1:]])
    texts = []
    for given in calls:
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is returned
            ring_attn(*given)
        texts.append(str(error.value))
    return texts


def test_dtensors_that_lie_otherwise_are_refused_in_a_sentence(pools):
    for replicated, of_heads, mixed in pools(2).run(refused):
        assert "along the sequence by one dimension of one mesh" in replicated
        assert "Shard(dim=2)" in of_heads
        assert "must be DTensors together" in mixed


def refused_elsewhere() -> list[str]:
    mesh, x = init_device_mesh("cpu", (2,)), torch.randn(1, 8, 16)
    given, found = distribute_tensor(x, mesh, [Shard(1)]), []
    layer = RingAttention(16, dim_head=8, heads=2, ring_attn=True, auto_shard_seq=False)

    def loss(x: Tensor) -> Tensor:
        return ring_cross_entropy(x, torch.zeros(1, 4, dtype=torch.int64))

    def batch(x: Tensor) -> object:
        return shard_batch({"input_ids": x[0].long()})

    def decode(x: Tensor) -> Tensor:
        return tree_attn_decode(x[None], x[None], x[None])

    def with_cache(x: Tensor) -> Tensor:
        return ring_attn_with_cache(x[None], None, None, RingCache(1, 8, 16))

    for call in (shard_sequence, layer, loss, batch, decode, with_cache):
        with pytest.raises(ValueError, match="got a DTensor") as told:
            call(given)
        found.append(str(told.value))
    return found


def test_dtensors_are_refused_where_tensors_are_plain(pools):
    for found in pools(2).run(refused_elsewhere):
        assert all("got a DTensor: its to_local() is" in told for told in found), found


def test_heads_first():
    whole = drawn(9, dtype=torch.float64)
    want = differentiated([t.clone() for t in whole])
    out, lse, *grads = differentiated(
        [t.transpose(1, 2).contiguous() for t in whole], heads_first=True
    )
    for got, exact in zip((out, *grads), (want[0], *want[2:])):
        assert relative_error(got.transpose(1, 2), exact) < 1e-15
    assert relative_error(lse, want[1]) < 1e-15


@pytest.mark.parametrize("heads_first", [False, True])
def test_tensors_without_values_give_shapes(heads_first):
    for kinds in (dict(device="meta"), dict(device="cpu")):
        with FakeTensorMode():
            q, v = (torch.randn(2, 6, 6, d, dtype=torch.bfloat16, **kinds) for d in (8, 5))
            leaves = [t.requires_grad_() for t in (q, q, v)]
            out, lse = ring_attn(*leaves, causal=True, return_lse=True, heads_first=heads_first)
            assert (out.shape, out.dtype, out.device) == (v.shape, v.dtype, v.device)
            assert (lse.shape, lse.dtype) == ((2, 6, 6), torch.float32)
            dq, _, dv = torch.autograd.grad(out.sum(), leaves, allow_unused=True)
            assert (dq.shape, dv.shape) == (q.shape, v.shape)


def test_without_values_shapes_are_checked_and_all_ranks_must_have_none():
    q, k, v = (t.to("meta") for t in drawn(6))
    with pytest.raises(ValueError, match="must be a multiple"):
        ring_attn(k, q, q.clone())

    def call(ring: Ring) -> None:
        mine = (q, k, v) if ring.rank == 1 else drawn(6)
        ring_attn(*mine, group=ring)

    (told,) = {*said(3, call)}
    assert told is not None
    assert "device must be the same on every rank" in told
    assert {*said(2, lambda ring: ring_attn(q, k, v, group=ring))} == {None}


def test_a_plan_of_other_shapes_is_refused_without_values_too():
    q, k, v = drawn(6)
    plan = RingPlan.make(q, k, v)
    assert ring_attn(*(t.to("meta") for t in (q, k, v)), plan=plan).shape == q.shape
    with pytest.raises(ValueError, match="made for other tensors"):
        ring_attn(*(t.to("meta") for t in drawn(7)), plan=plan)
