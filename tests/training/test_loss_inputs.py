"""Inputs of a loss: logits of a head, and checks of labels and weights."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ring_attention_pytorch.training import loss_inputs
from ring_attention_pytorch.training.loss_inputs import Head, check_labels, check_values, targets
from tests.support.reference import relative_error

X = torch.zeros(2, 3, 4)
WEIGHT = torch.zeros(5, 4)
LABELS = torch.tensor([[0, 4, -100], [1, -100, 2]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_formula_in_the_dtype_of_sums(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 4, generator=draw), torch.randn(5, 4, generator=draw)
    bias, wide = torch.randn(5, generator=draw), torch.float64
    x, weight, bias = (t.to(dtype) for t in (x, weight, bias))
    found = Head(weight, bias, scale=0.5, softcap=3.0).logits(x)
    rows = torch.stack([(weight.to(wide) * row).sum(-1) + bias.to(wide) for row in x.to(wide)])
    want = 3.0 * torch.tanh(rows * 0.5 / 3.0)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert relative_error(found, want) < 4 * torch.finfo(dtype).eps
    assert Head().logits(x).equal(x.to(found.dtype))


def test_a_head_counts_its_classes() -> None:
    assert Head(WEIGHT).classes(X) == 5
    assert Head().classes(X) == 4


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (Head(scale=2.0), "make logits of hidden states, together with head="),
        (Head(WEIGHT[:, :3]), r"head must be \[classes, 4\]"),
        (Head(WEIGHT.double()), "in the hidden states' torch.float32 on cpu"),
        (Head(WEIGHT, torch.zeros(4)), r"bias must be \[5\]"),
        (Head(WEIGHT, scale=0.0), "scale must be finite and not 0, got 0.0"),
        (Head(WEIGHT, scale=1e39), "scale must be finite and not 0"),
        (Head(WEIGHT, softcap=0.0), "softcap must be None, or positive and finite, got 0.0"),
        (Head(WEIGHT, softcap=torch.inf), "softcap must be None, or positive and finite"),
    ],
)
def test_heads_that_make_no_logits_are_refused(head: Head, why: str) -> None:
    Head(WEIGHT, torch.zeros(5), -1.0, 30.0).check(X)
    Head().check(X)
    with pytest.raises(ValueError, match=why):
        head.check(X)


def test_what_is_ignored_may_have_any_weight() -> None:
    weights = torch.tensor([[1.0, 0.5, torch.nan], [0.0, torch.inf, 2.0]])
    found = targets(LABELS, weights, -100, 5, torch.float64)
    assert found.real.tolist() == [[True, True, False], [True, False, True]]
    assert found.weights is not None
    assert found.weights.tolist() == [[1.0, 0.5, 0.0], [0.0, 0.0, 2.0]]
    assert found.weights.dtype == torch.float64
    assert found.wrong is None
    check_values(LABELS, weights, -100, 5)


@pytest.mark.parametrize("bad", [-1, 5, -101])
def test_a_label_that_is_no_class_is_an_error_here_and_marked_where_nobody_waits(
    bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = LABELS.clone()
    labels[1, 2] = bad
    with pytest.raises(ValueError, match=f"labels must be 0 to 4, or ignore_index=-100 .* {bad}"):
        check_values(labels, None, -100, 5)
    monkeypatch.setattr(loss_inputs, "reads_at_once", lambda _: False)
    found = targets(labels, None, -100, 5, torch.float32)
    assert found.wrong is not None
    assert found.wrong.nonzero().tolist() == [[1, 2]]
    assert 0 <= found.labels[1, 2] < 5
    with pytest.raises(ValueError, match="labels of an earlier loss were neither 0 to classes"):
        check_values(labels, None, -100, 5)
    check_values(labels, None, -100, 5)  # that is told once


@pytest.mark.parametrize("bad", [-1.0, torch.nan, torch.inf])
def test_a_weight_that_is_none_is_an_error(bad: float) -> None:
    weights = torch.ones(2, 3)
    weights[0, 1] = bad
    with pytest.raises(ValueError, match="weights must be finite and at least 0"):
        check_values(LABELS, weights, -100, 5)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ((X[0], LABELS, None), "must be floating"),
        ((X.long(), LABELS, None), "must be floating"),
        ((X[..., :0], LABELS, None), "with d above 0"),
        ((X, LABELS.int(), None), r"labels must be int64 \[2, 3\] on cpu"),
        ((X, LABELS[:, :2], None), r"labels must be int64 \[2, 3\]"),
        ((X, LABELS, torch.ones(2, 3, dtype=torch.complex64)), "weights must be real"),
        ((X, LABELS, torch.ones(3)), r"weights must be real \[2, 3\]"),
    ],
)
def test_shapes_and_dtypes_that_do_not_fit_are_refused(given, why: str) -> None:
    check_labels(X, LABELS, torch.ones(2, 3))
    with pytest.raises(ValueError, match=why):
        check_labels(*given)


def test_tensors_without_values_have_no_loss() -> None:
    """Their flags would stay, and a later loss read them."""
    with FakeTensorMode():
        fake, labels = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)
    given = {
        "x": (fake, LABELS, None), "labels": (X, labels, None), "weights": (X, LABELS, fake[..., 0])
    }  # fmt: skip
    for name, tensors in given.items():
        with pytest.raises(ValueError, match=f"^{name} must have values, got a FakeTensor on cpu"):
            check_labels(*tensors)
    with pytest.raises(ValueError, match="must have values, got a Tensor on meta"):
        check_labels(X.to("meta"), LABELS.to("meta"), None)
