"""Times that are predicted of each part of a call."""

import pytest

from ring_attention_pytorch.geometry.layouts import all_segments
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.schedule.cost import Clock, predict, walked
from ring_attention_pytorch.schedule.hardware import H200
from ring_attention_pytorch.schedule.pieces import KVShape, Workload, rounds_of
from ring_attention_pytorch.schedule.steps import Block, Part, gather, ring
from ring_attention_pytorch.schedule.timeline import predicted

JOB = KVShape(1, 32, 8, 128, 128, itemsize=2)
FIRST = H200._replace(keys_first=True)


def the_model_knows_what_is_left() -> None:
    """It counts what of the way home dq does not hide; bars of a drawing end when it says."""
    two = all_segments("zigzag", 2, 2 * 4096)
    work = Workload(two, two, Mask(causal=True))
    both = gather(work, [Block.of(each) for each in rounds_of(work, 2)])
    for slow, hidden in ((1, True), (40, False)):
        machines = [each._replace(pull=H200.pull / slow) for each in (H200, FIRST)]
        plain, first = (predict(both, 1, JOB, machine) for machine in machines)
        bars = [predicted(both.backward, 1, JOB, machine, back=True) for machine in machines]
        (home,) = (bar for bar in bars[0].under_way if bar.kind == "gradients travel")
        part = bars[0].computed[-1]
        dq = FIRST.deferred_share * (part.stop - part.start)
        gained = min(dq, home.stop - home.start)
        assert (gained < dq) == hidden
        assert plain.backward - first.backward == pytest.approx(gained)
        assert [bar.end for bar in bars] == pytest.approx([plain.backward, first.backward])
        assert plain.forward == first.forward
    program = ring(Workload(*[all_segments("zigzag", 3, 24576)] * 2, Mask(causal=True))).backward
    waits = {program.transfers[n] for step in program.steps if step.wait for n in step.start}
    end = 0.0
    for what, start, stop in walked(program, Clock.of(program, 1, JOB, FIRST, back=True)):
        if isinstance(what, Part):
            end = stop
        else:
            assert what not in waits or start >= end


def test_the_model_knows_what_is_left():
    the_model_knows_what_is_left()
