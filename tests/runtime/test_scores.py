"""Terms of scores: a bias of keys is added whatever the scale, and what does not fit is refused."""

import pytest
import torch

from ring_attention_pytorch.runtime.scores import (
    check_bias,
    check_per_head,
    columns,
    sinks_note,
    widened,
    with_bias,
)

Q, K = torch.zeros(2, 3, 4, 8), torch.zeros(2, 5, 2, 8)


@pytest.mark.parametrize("scale", [1.0, 8**-0.5, -0.3, 1e-3, 700.0])
@pytest.mark.parametrize("per_head", [False, True])
def test_scores_have_the_bias_added(per_head, scale):
    q, k = (torch.randn(t.shape, dtype=torch.float64) for t in (Q, K))
    bias = torch.randn((2, 5, 4) if per_head else (2, 5), dtype=torch.float64)
    wide_q, wide_k = with_bias(q, k, bias, scale)
    assert wide_k.shape[-1] == k.shape[-1] + columns(q, k, bias)
    own = bias if per_head else bias[..., None].expand(-1, -1, 4)
    for head in range(4):
        want = scale * q[:, :, head] @ k[:, :, head // 2].mT + own[:, None, :, head]
        got = scale * wide_q[:, :, head] @ wide_k[:, :, head // 2].mT
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12 * max(1, scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_bring_a_bias_in_two_columns(dtype):
    q, k = Q.to(dtype), K.to(dtype)
    bias = torch.tensor([[1.0, 1 / 3, -7.7, 1e-3, 40.1]] * 2, dtype=dtype)
    wide_q, wide_k = (t.double() for t in with_bias(q, k, bias, 0.3))
    assert columns(q, k, bias) == 2
    got = 0.3 * wide_q[:, 0, 0, None] @ wide_k[:, :, 0].mT
    torch.testing.assert_close(
        got[:, 0], bias.double(), rtol=4 * torch.finfo(dtype).eps ** 2, atol=1e-7
    )


WRONG = [
    (dict(bias=torch.zeros(2, 4)), r"key_bias must be \[2, 5\] or \[2, 5, 4\]"),
    (dict(bias=torch.zeros(2, 5, 2)), r"key_bias must be \[2, 5\] or \[2, 5, 4\]"),
    (dict(bias=torch.zeros(2, 5).half()), "in the keys' torch.float32"),
    (dict(bias=torch.tensor([[0.0, torch.inf, 0, 0, 0]] * 2)), "must be finite"),
    (dict(softclamp=5.0), "exclude each other"),
    (dict(scale=0.0), "needs a scale that is not 0"),
    (dict(scale=1e-39), "needs a scale of"),
]


@pytest.mark.parametrize(("how", "said"), WRONG)
def test_a_bias_that_can_t_be_is_refused(how, said):
    right = dict(bias=torch.zeros(2, 5), scale=None, softclamp=None)
    check_bias(q=Q, k=K, **right)
    check_bias(q=Q, k=K, **right | dict(bias=None, softclamp=5.0, scale=0.0))
    with pytest.raises(ValueError, match=said):
        check_bias(q=Q, k=K, **right | how)


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(2), torch.zeros(4, 1), torch.zeros(4).long(), torch.zeros(4, device="meta")],
)
def test_one_number_for_each_head_of_q(wrong):
    check_per_head("sinks", Q, torch.zeros(4))
    check_per_head("sinks", Q, None)
    with pytest.raises(ValueError, match=r"sinks must be floating \[4\]"):
        check_per_head("sinks", Q, wrong)


def test_what_ranks_compare_of_sinks():
    sinks = torch.zeros(4, requires_grad=True)
    assert sinks_note(None) is None
    assert sinks_note(sinks) != sinks_note(sinks.detach())
    with torch.no_grad():
        assert sinks_note(sinks) == sinks_note(sinks.detach())


def test_a_wider_tensor_takes_no_memory():
    t = widened(Q.requires_grad_(), 3)
    Q.requires_grad_(False)
    assert t.shape == (2, 3, 4, 11)
    assert t.requires_grad
    assert t.untyped_storage().nbytes() == 4
