"""Calls that are observed: their ranges, statistics and pictures; and that nobody sees the rest."""

import os
import runpy
from typing import Any
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ring_attention_pytorch import RingPlan, default_attention, observe, ring_attn
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime import observe as observe_module
from ring_attention_pytorch.runtime.observe import _Range, switch
from ring_attention_pytorch.runtime.observe import observed as thread

SHAPE = (1, 24, 4, 8)
TOKEN = 2 * 4 * 8 * 4  # bytes of a key and its value


class Counted(Ring):
    """A ring that counts the bytes that come, by messages."""

    came = 0

    def exchange(self, sends: Any, receives: Any) -> Any:
        self.came += sum(t.nbytes for _, t in receives)
        return super().exchange(sends, receives)


def seen(transport: str) -> dict[str, Any]:
    """Return what a rank finds of a call: with an observer, and then without."""
    ring = Counted()
    q = torch.randn(SHAPE, requires_grad=True)
    plan = RingPlan.make(q, q, q, causal=True, layout="zigzag", transport=transport, group=ring)
    results = []

    def call() -> None:
        out = ring_attn(q, q, q, plan=plan)
        results.append((out, *torch.autograd.grad(out.square().sum(), q)))

    with pytest.raises(ValueError, match="no call of this plan was observed"):
        plan.statistics()
    ring.came = 0
    with profile(activities=[ProfilerActivity.CPU]) as observed, observe():
        call()
    came = ring.came
    figures, text = plan.statistics(), str(plan.statistics())
    with profile(activities=[ProfilerActivity.CPU]) as alone:
        call()
    for one, other in zip(*results):
        assert torch.equal(one, other)
    assert plan.statistics() == figures  # the observed call's, still
    names = [
        [event.name for event in each.events() if event.name.startswith("ring attention")]
        for each in (observed, alone)
    ]
    return dict(figures=figures, text=text, came=came, names=names, place=ring.rank)


@pytest.mark.parametrize("transport", ["ring", "gather"])
def test_what_is_told_of_a_call_is_what_it_did(pools, transport):
    for found in pools(3).run(seen, transport):
        rank, (forward, backward) = found["place"], found["figures"]
        before = (rank - 1) % 3, (rank - 2) % 3
        owners = [(rank,), before] if transport == "gather" else [(rank,), *([r] for r in before)]
        for direction in (forward, backward):
            assert [list(hop.owners) for hop in direction.hops] == [list(each) for each in owners]
            computed = sum(hop.computed for hop in direction.hops)
            assert 0 < computed + direction.waited < direction.seconds
            assert all(hop.computed > 0 for hop in direction.hops)
            assert direction.hops[0].received == direction.hops[0].waited == 0
        assert forward.gradients_received == 0 < backward.gradients_received
        assert forward.received + backward.received == found["came"]
        if transport == "ring":
            assert [hop.received for hop in forward.hops] == [0, 24 * TOKEN, 24 * TOKEN]
        observed, alone = found["names"]
        assert alone == []
        last = f"rank {before[0]}" if transport == "ring" else f"ranks {before[0]}, {before[1]}"
        home = "go on" if transport == "ring" else "go home"
        for name in (
            "forward", "backward", f"hop 0: keys of rank {rank}, kernel sdpa",
            f"hop 1: keys of {last} start", f"hop 1: keys of {last} are waited for",
            f"hop 1: keys of {last}, kernel sdpa", f"hop 1: gradients of keys of {last} {home}",
            f"hop 0: gradients of keys of rank {rank} come home",
        ):  # fmt: skip
            assert f"ring attention, {name}" in observed
        assert f"hop 1, keys of {', '.join(map(str, owners[1]))}: " in found["text"]


def test_a_plan_of_one_process_is_observed_where_others_replay_a_tape():
    q = torch.randn(SHAPE)
    plan = RingPlan.make(q, q, q, causal=True, kernel="sdpa")
    wanted = default_attention(q, q, q, causal=True)
    for _ in range(4):
        torch.testing.assert_close(ring_attn(q, q, q, plan=plan), wanted)
    with observe():
        torch.testing.assert_close(ring_attn(q, q, q, plan=plan), wanted)
    forward, backward = plan.statistics()
    assert backward is None
    assert [hop.owners for hop in forward.hops] == [(0,)]


def test_ranges_end_where_a_call_fails_and_nobody_observes_after_the_block():
    q = torch.randn(SHAPE)
    plan = RingPlan.make(q, q, q, kernel="eager")
    broken = plan.kernel._replace(forward=mock.Mock(side_effect=RuntimeError("broken")))
    object.__setattr__(plan, "kernel", broken)
    open_ranges = []
    enter, leave = _Range.__enter__, _Range.__exit__

    def entering(self: _Range) -> _Range:
        open_ranges.append(self)
        return enter(self)

    def leaving(self: _Range, *error: Any) -> None:
        open_ranges.remove(self)
        leave(self, *error)

    with (
        mock.patch.object(_Range, "__enter__", entering),
        mock.patch.object(_Range, "__exit__", leaving),
        pytest.raises(RuntimeError, match="broken"),
        observe(),
    ):
        ring_attn(q, q, q, plan=plan)
    assert open_ranges == []
    assert not switch.on
    assert thread.record is None
    with pytest.raises(ValueError, match="observed"):
        plan.statistics()


def test_ranges_are_those_of_nvtx_too_where_tensors_are_on_cuda():
    with mock.patch("torch.cuda.nvtx") as nvtx, _Range("hop", torch.device("cuda")):
        nvtx.range_push.assert_called_once_with("hop")
        nvtx.range_pop.assert_not_called()
    nvtx.range_pop.assert_called_once_with()
    with mock.patch("torch.cuda.nvtx") as nvtx, _Range("hop", torch.device("cpu")):
        pass
    assert not nvtx.mock_calls


@pytest.mark.parametrize(("value", "on"), [("1", 1), ("", 0)])
def test_the_environment_observes_all_calls(value, on):
    with mock.patch.dict(os.environ, RING_ATTENTION_OBSERVE=value):
        assert runpy.run_path(observe_module.__file__)["switch"].on == on
