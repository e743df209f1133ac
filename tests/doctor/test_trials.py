"""Trials: every kernel that runs here is tried, and a wrong gradient is seen."""

from typing import Any
from unittest import mock

import torch

from ring_attention_pytorch.doctor import trials
from ring_attention_pytorch.doctor.trials import Parity, Trial, worst
from ring_attention_pytorch.ranks.ring import Ring


def test_every_kernel_that_runs_here_is_tried_and_right(pools: Any) -> None:
    parities, speed, rates, machines, ulysses = worst(pools(2).run(trials.trial, "cpu"))
    assert (machines, ulysses) == ((0, 0), 1)
    assert {(p.kernel, p.transport) for p in parities} == {
        (kernel, transport) for kernel in ("sdpa", "eager") for transport in ("ring", "gather")
    }
    assert all(p.right and p.error < 1e-14 for p in parities)
    assert speed is not None
    assert speed > 0
    assert rates is not None
    assert all(rate > 0 for rate in rates)


def wrong(kernel: str, rank: int) -> Trial:
    """For a pool: what the trials say of a kernel that makes a mistake in a gradient of a rank."""
    real = trials.ring_attn

    def mistaken(*qkv: torch.Tensor, **options: Any) -> torch.Tensor:
        q, k, v = qkv
        if options["kernel"] == kernel and Ring().rank == rank:
            k = k + 1e-6 * (k - k.detach())  # its gradient is off by 1e-6
        return real(q, k, v, **options)

    with mock.patch.object(trials, "ring_attn", mistaken):
        return trials.trial("cpu")


def test_a_wrong_gradient_on_one_rank_is_seen(pools: Any) -> None:
    parities, *_ = worst(pools(2).run(wrong, "sdpa", 1))
    assert {p.kernel for p in parities if not p.right} == {"sdpa"}


def test_nan_is_not_right() -> None:
    good, bad = (Parity("eager", "ring", "torch.float64", e, 1e-11) for e in (1e-15, float("nan")))
    for ranks in ([good, bad], [bad, good]):
        (found,), *_ = worst([Trial([parity], None) for parity in ranks])
        assert not found.right


def test_alone_there_are_no_links() -> None:
    parities, speed, *_ = trials.trial("cpu")
    assert speed is None
    assert all(p.right for p in parities)
