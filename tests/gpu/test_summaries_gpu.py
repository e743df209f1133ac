"""Near exactly, far in summary on a CUDA device: what the dense reference gives on the CPU."""

from functools import cache

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import SummaryPlan, summarize, summary_attn
from tests.support.reference import relative_error
from tests.support.summary_reference import summary_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
RULE = dict(window=100, stride=8, block=12, distance=None)
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


TOKENS = 300


def drawn() -> dict[str, Tensor]:
    n = TOKENS
    shapes = {"q": (2, n, 8, 64), "k": (2, n, 2, 64), "v": (2, n, 2, 64), "dout": (2, n, 8, 64)}
    shapes |= {"key_weights": (2, 12), "value_weights": (2, 12), "bias": (8,)}
    draw = torch.Generator().manual_seed(0)
    # values that bfloat16 has, so that only the arithmetic differs
    return {
        name: torch.randn(shape, generator=draw).bfloat16().double()
        for name, shape in shapes.items()
    }


def masks_of(packed: bool, masked: bool) -> dict[str, Tensor]:
    masks = {}
    if packed:
        masks["documents"] = (torch.arange(TOKENS) >= torch.tensor([[60], [180]])).long()
    if masked:
        masks["key_mask"] = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(1)) < 0.8
    return masks


@cache
def wanted(packed: bool, masked: bool) -> list[Tensor]:
    """Return the reference's results; cached, because they take a second on the CPU."""
    return found(drawn(), dense, masks_of(packed, masked))


def found(given: dict[str, Tensor], attend, masks: dict[str, Tensor]) -> list[Tensor]:
    """out and all gradients."""
    dout = given.pop("dout")
    leaves = {name: t.requires_grad_() for name, t in given.items()}
    weights = leaves["key_weights"], leaves["value_weights"]
    out = attend(leaves["q"], leaves["k"], leaves["v"], weights, leaves["bias"], masks)
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    return [t.detach().cpu().double() for t in (out, *grads)]


def dense(q, k, v, weights, bias, masks) -> Tensor:
    return summary_attention(q, k, v, **RULE, weights=weights, bias=bias, **masks)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [(None, torch.float32), *((k, torch.bfloat16) for k in (None, "triton", "sdpa-flash", "flex"))],
)
def test_kernels_give_the_dense_results(kernel, dtype, packed: bool) -> None:
    masked = packed and kernel != "sdpa-flash"  # which has no key masks

    def by_kernel(q, k, v, weights, bias, masks) -> Tensor:
        plan = SummaryPlan.make(q, k, v, **RULE, kernel=kernel, **masks)
        far = summarize(k, v, plan=plan, weights=weights)
        return summary_attn(q, k, v, *far, plan=plan, bias=bias)

    on_gpu = {
        name: t.to("cuda", dtype if name in ("q", "k", "v", "dout") else torch.float32)
        for name, t in drawn().items()
    }
    masks = {name: t.cuda() for name, t in masks_of(packed, masked).items()}
    errors = [
        relative_error(a, b)
        for a, b in zip(found(on_gpu, by_kernel, masks), wanted(packed, masked))
    ]
    assert max(errors) < BOUNDS[dtype], errors
