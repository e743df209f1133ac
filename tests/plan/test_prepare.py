"""Preparations of a plan for its kernel, and for calls that are short."""

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

from ring_attention_pytorch.geometry.documents import of_borders
from ring_attention_pytorch.geometry.layouts import Segment
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.kernels import KERNELS, choose
from ring_attention_pytorch.plan import plan_cache, prepare
from ring_attention_pytorch.plan.prepare import _of_documents, _with_calls_of
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.interfaces import KernelRequest, SelectedKernel
from ring_attention_pytorch.schedule import policy
from ring_attention_pytorch.schedule.cost import seconds_by
from ring_attention_pytorch.schedule.hardware import H200, hardware
from ring_attention_pytorch.schedule.pieces import KVShape, Workload


@pytest.mark.parametrize(
    ("name", "merges", "keys_first"),
    [
        ("triton", True, True), ("eager", False, False),
        ("triton+eager", False, False), ("eager+triton", False, True),
    ],
)  # fmt: skip
def test_kernels_merge_if_both_ways_do_and_make_keys_first_if_backward_does(
    name, merges, keys_first, monkeypatch
):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q = torch.randn(1, 6, 2, 8)
    kernel = choose(name, KernelRequest.of(q, q))
    assert (kernel.traits.fuses_merge, kernel.traits.keys_first) == (merges, keys_first)
    machine = _with_calls_of(kernel, H200)
    assert (machine.one_call, machine.keys_first) == (merges, keys_first)


def few_may_be_short(patch: pytest.MonkeyPatch) -> None:
    """By the transport of their graphs, if not by their own."""
    q = torch.randn(1, 8, 2, 4)
    patch.setattr(policy, "_SMALL", -1)
    for own_low_priority in (False, True):
        plan_cache.forget()
        fabric = SimpleNamespace(name="", ring=Ring.alone(), taped=False, sends_messages=True)
        few, made = (
            SimpleNamespace(schedule=SimpleNamespace(own_low_priority=on), fabric=fabric)
            for on in (False, own_low_priority)
        )
        patch.setattr(prepare, "make_transport", lambda *_, made=made: made)
        patch.setattr(prepare, "make_one_stream", lambda *_, few=few: few)
        assert RingPlan.make(q, q, q, causal=True).chosen.concurrent == own_low_priority


def test_few_may_be_short(monkeypatch):
    few_may_be_short(monkeypatch)


LONG, MIDDLE = [13800, 2584], [3473, 4129, 7037, 1745]
HALF = [8192, *[482] * 16, 480]
SHORT = [
    930, 224, 517, 143, 289, 144, 774, 98, 634, 819, 257, 932, 546, 723, 830, 617, 924, 151,
    318, 102, 748, 76, 921, 871, 701, 339, 484, 574, 104, 363, 445, 324, 462,
]  # fmt: skip
# ms of both passes on one H200, by Triton in few calls and by cuDNN with a call for each document
MEASURED = {
    (32, 8, 128, 128): [(LONG, 12.2, 11.9), (MIDDLE, 5.03, 6.0), (HALF, 4.35, 7.05),
                        ([4096] * 4, 4.15, 5.07), ([2048] * 8, 2.21, 4.51), (SHORT, 1.06, 14.4)],
    (64, 8, 128, 128): [(LONG, 24.5, 23.2), (MIDDLE, 11.0, 11.2), (HALF, 9.36, 11.7),
                        ([2048] * 8, 4.66, 7.19), (SHORT, 2.12, 11.7)],
    (16, 16, 192, 128): [(LONG, 14.3, 7.72), (MIDDLE, 6.41, 4.03), (HALF, 5.7, 8.23),
                         ([2048] * 8, 2.89, 4.51), (SHORT, 1.56, 15.0)],
    (16, 2, 256, 256): [(LONG, 17.8, 14.0)],
}  # fmt: skip


@pytest.mark.parametrize("sizes", MEASURED)
def test_documents_get_the_kernel_that_was_faster(sizes):
    """The cost model's estimates, too, are within a third of what was measured, if compared."""
    few, each = (
        SelectedKernel(
            name, KERNELS[name].forward, KERNELS[name].backward, KERNELS[name].CAN.traits
        )
        for name in ("triton", "sdpa-cudnn")
    )
    shape = KVShape(1, *sizes, itemsize=2)
    grouped = few if shape.heads >= 2 * shape.key_heads else None
    like = torch.empty(1, 0, shape.heads, shape.d)
    mine = SimpleNamespace(kernel=few, for_short=grouped, for_long=each, shaped=(like,))
    machine = _with_calls_of(few, hardware("triton", head_size=shape.d))
    for lengths, *measured in MEASURED[sizes]:
        one = ((Segment(0, 1, sum(lengths)),),)
        mask = Mask(causal=True, documents=of_borders([0, *accumulate(lengths)]))
        work = Workload(one, one, mask)
        kernel, _, predicted = _of_documents(
            mine, work, shape, machine, lambda it, w=work: seconds_by("ring", w, shape, 1, it)
        )
        assert kernel.name == ("triton" if measured[0] < measured[1] else "sdpa-cudnn"), lengths
        for seconds, ms in zip(predicted.values(), measured):
            assert 1e3 * seconds == pytest.approx(ms, rel=1 / 3)
