"""default_attention against the oracle."""

from typing import Any

import pytest
import torch

from ring_attention_pytorch import RingAttention, default_attention
from tests.support.module_cases import EXACT
from tests.support.reference import dense_attention, relative_error

# one process


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("softclamp", [None, 0.7])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 3), (False, 2)])
def test_default_attention_is_the_oracle(
    causal: bool, window: int | None, softclamp: float | None, masked: bool
) -> None:
    q, k, v = (torch.randn(2, 9, h, 8, dtype=torch.float64) for h in (4, 2, 2))
    mask = torch.rand(2, 9) < 0.5 if masked else None
    if mask is not None:
        mask[0, :4] = False
    tensors = [t.requires_grad_() for t in (q, k, v)]
    clamp = {} if softclamp is None else {"softclamp_qk_sim": True, "softclamp_value": softclamp}
    got = default_attention(*tensors, mask, causal, window=window, **clamp)
    want, _ = dense_attention(
        *tensors, causal=causal, window=window, key_mask=mask, softclamp=softclamp
    )
    cotangent = torch.randn_like(want)
    assert relative_error(got, want) < EXACT
    for g, w in zip(*(torch.autograd.grad(out, tensors, cotangent) for out in (got, want))):
        assert relative_error(g, w) < EXACT


def test_default_attention_takes_contexts_wider_values_and_16_bits() -> None:
    q, k, v = (torch.randn(2, n, 4, d, dtype=torch.float64) for n, d in ((5, 8), (7, 8), (7, 6)))
    want, _ = dense_attention(q, k, v)
    assert relative_error(default_attention(q, k, v), want) < EXACT
    for dtype in (torch.float16, torch.bfloat16):
        got = default_attention(q.to(dtype), k.to(dtype), v.to(dtype))
        assert got.dtype == dtype
        want, _ = dense_attention(*(t.to(dtype).double() for t in (q, k, v)))
        assert relative_error(got, want) < torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"causal": True}, "causal and window need as many keys as queries"),
        ({"window": 1}, "causal and window need as many keys as queries"),
        ({"softclamp_qk_sim": True, "softclamp_value": 0.0}, "softclamp_value must be positive"),
    ],
)
def test_default_attention_refuses_what_cannot_be(options: dict[str, Any], words: str) -> None:
    q, k = torch.randn(1, 5, 2, 4), torch.randn(1, 6, 2, 4)
    with pytest.raises(ValueError, match=words):
        default_attention(q, k, k, **options)
    with pytest.raises(ValueError, match="window must be None or at least 0"):
        default_attention(q, q, q, window=-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_its_inputs_and_not_the_scores(dtype: torch.dtype) -> None:
    """As of `ring_attn`. Scores in 16 bits have no room for those of hidden pairs."""
    q, k, v = (torch.randn(2, 9, h, 8) for h in (4, 2, 2))
    mask = torch.rand(2, 9) < 0.5
    with torch.autocast("cpu", dtype=dtype):
        found = default_attention(q, k.to(dtype), v, mask, causal=True)
        exact = default_attention(q.double(), k.double(), v.double(), mask, causal=True)
    want = default_attention(q.to(dtype), k.to(dtype), v.to(dtype), mask, causal=True)
    assert found.dtype == dtype
    assert found.equal(want)
    assert exact.equal(default_attention(q.double(), k.double(), v.double(), mask, causal=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_without_kernels_run_under_autocast(dtype: torch.dtype) -> None:
    layer = RingAttention(16, dim_head=8, heads=2, causal=True, force_regular_attn=True)
    x = torch.randn(1, 6, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        out = layer(x)
    out.float().sum().backward()
    assert out.dtype == dtype
    assert relative_error(out, layer(x)) < 0.05
    assert x.grad is not None
    assert x.grad.isfinite().all()
