"""The machine that is expected, in numbers, and a run of one process that is faster than none."""

import pytest
import torch

from ring_attention_pytorch.doctor import speed as timed
from ring_attention_pytorch.doctor.speed import SIZES, Size, speed
from ring_attention_pytorch.ranks.ring import Ring

SMALL = Size(16, 4, 2, 8, torch.float32)


def test_tensors_are_of_the_sizes_that_are_said() -> None:
    q, k, v = SMALL.tensors("cpu")
    assert q.shape == (1, 16, 4, 8)
    assert k.shape == v.shape == (1, 16, 2, 8)
    assert all(t.requires_grad and t.dtype == torch.float32 for t in (q, k, v))
    assert {*SIZES} == {"cpu", "cuda"}


def test_a_hop_of_a_mebibyte_takes_what_links_say() -> None:
    machine = timed._machine((1e12, 5e11), 2e9)
    assert (machine.forward, machine.backward, machine.pull) == (1e12, 5e11, 2e9)
    (zero, at_zero), (size, seconds) = machine.hops
    assert (zero, at_zero) == (0, 0.0)
    assert size / seconds == pytest.approx(2e9)
    alone = timed._machine((1e12, 5e11), None)
    assert alone.hops[1][1] == 0


def test_the_least_of_several_rounds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0, 5, 9, 10, 12, 19, 20, 23, 26, 30, 39, 49])
    monkeypatch.setattr(timed, "_now", lambda _: float(next(times)))
    q, k, v = SMALL.tensors("cpu")
    found = timed._seconds(lambda: q.sum() + k.sum() + v.sum(), (q, k, v), Ring.alone())
    assert found == (2.0, 3.0)  # not of the same round


def test_alone_what_is_measured_is_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "cpu", SMALL)
    found = speed("cpu", None)
    assert all(0 < rate < float("inf") for rate in found)
