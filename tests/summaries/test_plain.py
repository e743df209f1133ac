"""Attention in plain PyTorch, against dense attention."""

import pytest
import torch

from ring_attention_pytorch.runtime.interfaces import ScoreMods
from ring_attention_pytorch.summaries.plain import attended, scores_of
from tests.support.reference import dense_attention, relative_error

DOUBLE = torch.float64


@pytest.mark.parametrize("clamp", [None, 2.0])
def test_scores_and_results_are_those_of_dense_attention(clamp: float | None) -> None:
    q, k, v = (torch.randn(1, n, 2, 4, dtype=DOUBLE, requires_grad=True) for n in (5, 7, 7))
    mask = torch.tensor([[True, False, True, True, False, True, True]])
    terms = ScoreMods(0.3, clamp, 1)
    scores = scores_of("bihd,bjhd->bhij", q, k, terms)
    got = attended("bhij,bjhd->bhid", scores, mask[:, None, None], v)
    want = dense_attention(q, k, v, scale=0.3, softclamp=clamp, key_mask=mask)
    assert relative_error(got[0].transpose(1, 2), want[0]) < 1e-12
    assert relative_error(got[1], want[1]) < 1e-12
    dout, dlse = torch.randn(1, 2, 5, 4, dtype=DOUBLE), torch.randn(1, 2, 5, dtype=DOUBLE)
    grads = torch.autograd.grad(got, (q, k, v), (dout, dlse))
    of_dense = torch.autograd.grad(want, (q, k, v), (dout.transpose(1, 2), dlse))
    for grad, of_want in zip(grads, of_dense):
        assert relative_error(grad, of_want) < 1e-12


def test_who_sees_nothing_has_0_and_no_gradient() -> None:
    scores = torch.randn(2, 3, dtype=DOUBLE, requires_grad=True)
    v = torch.randn(3, 4, dtype=DOUBLE, requires_grad=True)
    seen = torch.tensor([[True, False, True], [False] * 3])
    out, lse = attended("ij,jd->id", scores, seen, v)
    assert not out[1].any()
    assert lse[1] == -torch.inf
    by_scores, by_v = torch.autograd.grad((out, lse[0]), (scores, v), (out.sin(), lse[0]))
    assert not by_scores[~seen].any()
    assert by_scores[0, 0] != 0
    assert by_v.isfinite().all()
    assert not by_v[1].any()
