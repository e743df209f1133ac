"""The public function: what it finds out, what autocast makes of it, and what it refuses."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attention_pytorch import functional
from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.cases import Attention, oracle
from tests.support.crossed import cross
from tests.support.reference import dense_attention, relative_error


def test_cross_attention_with_other_lengths_is_found_without_being_asked_for():
    case = cross((4, 4), (7, 3))
    (q, k, v), _, _, _ = case.data()

    def main(ring: Ring) -> Tensor:
        queries, keys = case.places(ring.rank, 2)
        return ring_attn(q[:, queries], k[:, keys], v[:, keys], group=ring)

    got, _ = threads.run(2, main)
    assert relative_error(torch.cat(got, 1), oracle(case)[0]) < 1e-12


def test_autocast_makes_one_dtype_of_mixed_inputs():
    case = Attention(64, "zigzag", causal=True, d=16, d_v=16)
    (q, k, v), _, dout, _ = case.data()
    q, k, v = q.float(), k.float(), v.bfloat16()
    rounded = [t.bfloat16() for t in (q, k, v)]

    def dense(dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in rounded]
        out, _ = dense_attention(*leaves, causal=True)
        return [out, *torch.autograd.grad(out, leaves, dout.to(dtype))]

    exact, plain = dense(torch.float64), dense(torch.bfloat16)
    bounds = [times * (p - e).abs().max() for times, p, e in zip((2, 3, 3, 3), plain, exact)]

    def main(ring: Ring) -> None:
        at, _ = case.places(ring.rank, 2)
        mine = [t[:, at].requires_grad_() for t in (q, k, v)]
        with torch.autocast("cpu", torch.bfloat16):
            out = ring_attn(*mine, causal=True, layout="zigzag", group=ring)
        got = [out, *torch.autograd.grad(out, mine, dout[:, at].to(out.dtype))]
        bf16, fp32 = torch.bfloat16, torch.float32
        assert [t.dtype for t in got] == [bf16, fp32, fp32, bf16]
        for g, e, bound in zip(got, exact, bounds):
            assert (g - e[:, at]).abs().max() <= bound

    threads.run(2, main)


def test_mixed_dtypes_without_autocast_are_refused():
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"one floating dtype.*bfloat16.*autocast"):
        ring_attn(q, q, q.bfloat16())


def refused_groups() -> list[str]:
    """For a pool of four: what is said of groups that can be no ring."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    said = []
    q = torch.zeros(1, 4, 1, 4)
    for make in (lambda: Ring(mesh), lambda: Ring(size=3), lambda: Ring(size=0)):
        try:
            ring_attn(q, q, q, group=make())
        except ValueError as error:
            said.append(str(error))
    return said


def test_groups_that_can_be_no_ring_are_refused(pools):
    for mesh, three, none in pools(4).run(refused_groups):
        assert "DeviceMesh of one dimension" in mesh
        assert "got 2" in mesh
        assert "divide the group's 4 ranks, got 3" in three
        assert "got 0" in none


def test_a_type_error_within_a_call_stays_one(monkeypatch):
    def raising(*given):
        raise TypeError("of its own")

    monkeypatch.setattr(functional, "tangents_note", raising)
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(TypeError, match="of its own"):
        ring_attn(q, q, q)
