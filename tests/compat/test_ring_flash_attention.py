"""`ring_flash_attn` of 0.5.20, against its plain attention."""

import pytest
import torch

from ring_attention_pytorch import default_attention, ring_flash_attn
from tests.support.original import EXACT
from tests.support.reference import dense_attention, relative_error


@pytest.mark.parametrize(("causal", "masked"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("softclamp", [False, True])
def test_assert_flash(causal: bool, masked: bool, softclamp: bool) -> None:
    qkv = torch.randn(3, 2, 62, 2, 16, dtype=torch.float64)
    mask = torch.randint(0, 2, (2, 62)).bool() if masked else None
    cotangent, results = torch.randn(2, 62, 2, 16, dtype=torch.float64), []
    for function in (
        lambda q, k, v: dense_attention(
            q, k, v, causal=causal, key_mask=mask, softclamp=2.0 if softclamp else None
        )[0],
        lambda q, k, v: ring_flash_attn(
            q, k, v, mask, causal, 4, softclamp_qk_sim=softclamp, softclamp_value=2.0
        ),
        lambda q, k, v: default_attention(q, k, v, mask, causal, softclamp, 2.0),
    ):
        given = [t.clone().requires_grad_() for t in qkv]
        out = function(*given)
        out.backward(cotangent)
        results.append([out, *(t.grad for t in given)])
    for found in results[1:]:
        assert max(map(relative_error, found, results[0])) < EXACT
