"""float16, whose numbers end at 65504: what is finite in one process is finite over a ring."""

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import RingPlan, ring_attn
from tests.support import threads
from tests.support.cases import CPU_KERNELS, over_shared_memory
from tests.support.reference import dense_attention, relative_error


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_large_gradients_of_lse_are_finite_in_float16(kernel: str) -> None:
    """Loss scaling makes them: 65504 is the largest number of float16."""
    given = [torch.randn(1, 50, 2, 16).half().requires_grad_() for _ in range(3)]
    exact = [t.detach().double().requires_grad_() for t in given]
    found = []
    for tensors, of in ((given, lambda *t: ring_attn(*t, return_lse=True, kernel=kernel)),
                        (exact, dense_attention)):  # fmt: skip
        out, lse = of(*tensors)
        cotangents = (torch.zeros_like(out), torch.full_like(lse, 1e5))
        found.append(torch.autograd.grad((out, lse), tensors[:2], cotangents))
    for got, want in zip(*found):
        assert relative_error(got, want) < 2e-3


WAYS = {
    "ring": dict(transport="ring"),
    "gather": dict(transport="gather"),
    "one owner at a time": dict(transport="gather", memory=0),
    "shared memory": dict(at_once=3),
    "copied aside": dict(at_once=3, by_copy_engine=True),
    "one by one": dict(at_once=1),
    "together": dict(at_once=3, together=True),
    "own keys apart, one stream": dict(at_once=3, own_apart=True),
}


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("way", WAYS)
def test_parts_may_cancel_that_float16_does_not_hold(way, kernel):
    """Queries of the first half ask for what those of the second half take back."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 24, h, 8, generator=draw).half() * 0.1 for h in (8, 1, 1))
    dout = torch.full((1, 24, 8, 8), 60000.0).half()
    dout[:, 12:] *= -1
    how, shared = dict(WAYS[way]), "transport" not in WAYS[way]

    def main(ring: threads.ThreadRing) -> list[Tensor]:
        mine = [t.tensor_split(4, 1)[ring.rank].requires_grad_() for t in (q, k, v)]
        plan = RingPlan.make(*mine, group=ring, kernel=kernel, **({} if shared else how))
        if shared:
            plan = over_shared_memory(plan, mine, ring, **how)
        out = ring_attn(*mine, plan=plan)
        return torch.autograd.grad(out, mine, dout.tensor_split(4, 1)[ring.rank])

    with threads.late():
        got = [torch.cat(parts, 1) for parts in zip(*threads.run(4, main)[0])]
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    want = torch.autograd.grad(dense_attention(*exact)[0], exact, dout.double())
    assert want[2].abs().max() < 65504
    for found, wanted in zip(got, want):
        assert found.isfinite().all()
        assert relative_error(found, wanted) < 2e-2


def refused(**options: object) -> str:
    q = torch.zeros(1, 3, 1, 8).half()
    with pytest.raises(ValueError, match=r"key_bias in torch\.float16 needs a scale") as told:
        ring_attn(q, q, q, key_bias=q[..., 0, 0], **options)
    return str(told.value)


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("heads", ["shared", "of each head"])
@pytest.mark.parametrize(
    ("d", "scale", "bias"),
    [(64, None, -10000.0), (128, None, -6000.0), (256, None, -65504.0), (8, None, 3.14),
     (16, 2.0**-15, -6000.0), (16, 4.0, 0.01)],
)  # fmt: skip
def test_a_bias_of_any_size_is_added(d, scale, bias, heads, kernel):
    """As masks are often written: so much less that a key is as good as hidden."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 12, h, d, generator=draw).half() for h in (4, 2, 2, 4))
    of_keys = torch.zeros(1, 12, 4).half()
    of_keys[:, ::3] = bias
    of_keys = of_keys[..., 0] if heads == "shared" else of_keys

    def main(ring: threads.ThreadRing) -> tuple[Tensor, ...]:
        mine = [t.tensor_split(2, 1)[ring.rank].requires_grad_() for t in (q, k, v, of_keys)]
        out = ring_attn(*mine[:3], key_bias=mine[3], scale=scale, kernel=kernel, group=ring)
        return out, *torch.autograd.grad(out, mine, dout.tensor_split(2, 1)[ring.rank])

    got = [torch.cat(parts, 1) for parts in zip(*threads.run(2, main)[0])]
    exact = [t.double().requires_grad_() for t in (q, k, v, of_keys)]
    want = dense_attention(*exact[:3], scale=scale, key_bias=exact[3])[0]
    want = want, *torch.autograd.grad(want, exact, dout.double())
    for found, wanted in zip(got, want):
        assert relative_error(found, wanted) < 3e-3


def test_a_bias_that_float16_cannot_bring_is_refused_with_its_bound():
    for scale in (2.0**-16, -1e-6, 2.0**15):
        assert "3.1e-05 to 1.6e+04" in refused(scale=scale)
