"""Tapes on a GPU replay what would be computed, by kernels that tapes only see launched.

Each call has other tensors, in other memory, than those that were recorded.
"""

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import RingPlan
from ring_attention_pytorch.kernels import KERNELS
from tests.support.reference import relative_error
from tests.support.taped import replayed, results, untaped

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
N, H, H_KV = 320, 4, 2
CASES = {
    "causal": dict(causal=True),
    "full": dict(),
    "window": dict(causal=True, window=50),
    "documents": dict(causal=True, cu_seqlens=[0, 30, 31, 170, 320]),
    "masked": dict(key_mask=torch.arange(2 * N).view(2, N) % 3 > 0),
    "softclamp": dict(causal=True, softclamp=5.0),
    "alibi": dict(causal=True, alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.1])),
    "dropout": dict(dropout=0.25, dropout_seed=3),
}


def drawn(d: int) -> list[Tensor]:
    """Draw q, k, v and a cotangent."""
    new = [torch.randn(2, N, h, d, device="cuda", dtype=torch.bfloat16) for h in (H, H_KV, H_KV, H)]
    return [t.requires_grad_(i < 3) for i, t in enumerate(new)]


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k not in ("eager", "flex", "sdpa")])
def test_a_tape_does_what_would_be_done(kernel: str, case: str, d: int) -> None:
    options = {name: t.cuda() if isinstance(t, Tensor) else t for name, t in CASES[case].items()}
    try:
        direct = untaped(drawn(d)[:3], kernel=kernel, **options)
        plan = RingPlan.make(*drawn(d)[:3], kernel=kernel, **options)
    except ValueError as error:
        pytest.skip(str(error))
    held: list[Tensor] = []
    for _ in range(6):
        q, k, v, dout = drawn(d)
        held += [q, k, v, dout]  # so that the next ones are elsewhere
        found = [results(each, [q, k, v], dout) for each in (plan, direct)]
        for name, taped, computed in zip(("out", "lse", "dq", "dk", "dv"), *found):
            assert relative_error(taped, computed) < 4e-3, name
    if plan.tapes is not None:
        assert replayed(plan) == ["backward", "forward"]
        assert len(plan.tapes.by_kind) == 2
