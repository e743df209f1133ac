"""The numbers of `check_parity`: over ranks of threads, and in a world of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ring_attention_pytorch import ParityReport, check_parity, ring_attn
from ring_attention_pytorch.doctor import parity
from ring_attention_pytorch.doctor.parity import GradientError
from ring_attention_pytorch.ranks.alone import one_process
from ring_attention_pytorch.ranks.ring import Ring, as_ring
from tests.support import threads


def test_gradients_are_averaged_over_ranks():
    def main(ring: Ring) -> tuple[float, float]:
        want = {"w": torch.tensor([3.0, 4.0]), "none": torch.zeros(2)}
        here = {"w": want["w"] * (0.5 + ring.rank), "none": torch.zeros(2)}
        ((name, error), (_, nothing)), size = parity._gradients(here, want, ring)
        assert (name, nothing) == ("w", 0.0)
        return error, size

    for error, size in threads.run(2, main)[0]:
        assert error == pytest.approx(0.0, abs=1e-7)
        assert size == pytest.approx(1.0)


def test_nan_is_not_parity():
    nan = GradientError("w", float("nan"))
    report = ParityReport(2, 1.0, 1.0, None, (nan,), 1e-3, ())
    assert not report.same
    assert "No known mistake explains this." in str(report)


def test_in_a_world_of_one_rings_are_alone():
    def main(ring: Ring) -> None:
        if ring.rank == 1:
            return
        with one_process():
            assert as_ring(ring).size == Ring().size == 1
            assert (dist.get_rank(), dist.get_world_size("a group")) == (0, 1)
            t = torch.ones(2)
            dist.all_reduce(t)
            assert t.sum() == 2
        assert as_ring(ring) is ring

    threads.run(2, main)
    q = torch.randn(1, 4, 2, 8)
    with one_process():
        assert ring_attn(q, q, q).shape == q.shape


class Sum(nn.Module):
    def __init__(self, result: str):
        super().__init__()
        self.weight, self.result = nn.Parameter(torch.ones(3)), result

    def forward(self, x: torch.Tensor):
        loss = (x * self.weight).square().mean()
        return {"loss": loss, "logits": x} if self.result == "mapping" else x


def test_what_is_given_back_stays():
    model = Sum("mapping")
    model.weight.grad = torch.full((3,), 7.0)
    assert check_parity(model, {"x": torch.randn(2, 5, 3)}).right
    assert model.weight.grad.tolist() == [7.0] * 3


def test_what_is_no_such_model_is_an_error():
    with pytest.raises(ValueError, match="must return its loss"):
        check_parity(Sum("tensor"), {"x": torch.randn(2, 5, 3)})
    with pytest.raises(ValueError, match="no parameters that require gradients"):
        check_parity(nn.Identity(), {"input": torch.randn(2, 5, 3)})
