"""What a kernel leaves for later, dq, is done while gradients of keys travel, on every way."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ring_attention_pytorch import RingPlan, explain_plan, observe, ring_attn
from ring_attention_pytorch.comm import fused_copies, transports
from ring_attention_pytorch.comm.fabric_kernels import OneStream
from ring_attention_pytorch.comm.scheduled_transport import ScheduledTransport, _parts
from ring_attention_pytorch.geometry.layouts import all_segments
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.kernels import eager
from ring_attention_pytorch.plan import prepare
from ring_attention_pytorch.runtime import observe as observing
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from ring_attention_pytorch.runtime.deferred import Deferred
from ring_attention_pytorch.runtime.interfaces import Grads, KVBlock, Residuals
from ring_attention_pytorch.runtime.launches import compile_only
from ring_attention_pytorch.schedule import policy
from ring_attention_pytorch.schedule.cost import Clock, predict, walked
from ring_attention_pytorch.schedule.hardware import H200
from ring_attention_pytorch.schedule.pieces import KVShape, Workload
from ring_attention_pytorch.schedule.pieces import schedule as rounds_of
from ring_attention_pytorch.schedule.steps import (
    GRADS,
    Block,
    Part,
    Program,
    Schedule,
    gather,
    ring,
)
from ring_attention_pytorch.schedule.timeline import predicted
from tests.support import threads
from tests.support.cases import Attention, check_in_threads, check_symmetric
from tests.support.interpreter import needs_triton

JOB = KVShape(1, 32, 8, 128, 128, itemsize=2)
FIRST = H200._replace(keys_first=True)


def leave_dq(patch: pytest.MonkeyPatch) -> None:
    """Let the kernel "eager" make dk and dv first, and leave dq for later if it may."""
    whole = eager.backward

    def backward(saved: Any, keys: KVBlock, tiles: Any, terms: Any, grads: Grads) -> None:
        dq = GradAccumulator(saved.q)
        whole(saved, keys, tiles, terms, grads._replace(dq=dq))

        def rest() -> None:
            grads.dq.begin_update().add_(dq.begin_update())

        rest() if grads.dq.deferred is None else grads.dq.deferred.append(rest)

    patch.setattr(eager, "backward", backward)
    patch.setattr(
        eager, "CAN", eager.CAN._replace(traits=eager.CAN.traits._replace(keys_first=True))
    )


def what_is_left_is_in_the_gradients(patch: pytest.MonkeyPatch) -> None:
    """Over messages and shared memory, of one rank or several, of samples that differ."""
    leave_dq(patch)
    case = Attention(29, "zigzag", causal=True, masked=True, d_v=5, kernel="eager")
    differ = Attention(12, kernel="eager", ids=((0,) * 12, (3, 3, 0, 0) * 3))
    for how in (dict(), dict(transport="gather"), dict(transport="gather", memory=0)):
        for size in (1, 3):
            check_in_threads(replace(case, **how), size)
            check_in_threads(replace(differ, **how), size)
    for at_once, ways in ((9, {}), (1, {}), (9, dict(together=True)), (9, dict(own_apart=True))):
        check_symmetric(case, 3, at_once, **ways)


def test_what_is_left_is_in_the_gradients(monkeypatch):
    what_is_left_is_in_the_gradients(monkeypatch)


@dataclass
class _Told:
    """A call that keeps a diary."""

    program: Program
    diary: list[str] = field(default_factory=list)

    def start(self, number: int) -> None:
        if self.program.transfers[number].kind == GRADS:
            self.diary.append("gradients start")

    def wait(self, number: int) -> None:
        self.diary.append("wait")

    def keys(self, part: Part) -> Any:
        return KVBlock(*[torch.empty(0)] * 2, None, self.program.segments(part, 1))

    def grads(self, part: Part, keys: KVBlock) -> tuple[()]:
        return ()

    def computed(self, part: Part) -> None:
        self.diary.append("dk, dv")


class _Telling(ScheduledTransport):
    def call(self, program: Program, own: Any, totals: Any = None) -> Any:
        self.known.append(_Told(program))
        return self.known[-1]

    known: Any = ()


def diary(schedule: Schedule) -> list[str]:
    """What a rank does in backward, in order."""
    carrier, deferred = _Telling(schedule, None), Deferred()
    object.__setattr__(carrier, "known", [])
    for _ in carrier.stream_back(None, (), deferred):
        deferred.append(lambda: carrier.known[0].diary.append("dq"))
    deferred.do()
    return carrier.known[0].diary


def what_is_left_is_done_in_time() -> None:
    """When gradients have started, and before anything is waited for."""
    three = all_segments("zigzag", 3, 24)
    work = Workload(three, three, Mask(causal=True))
    one_round = gather(work, [Block.of(each) for each in rounds_of(work, 2)])
    assert diary(one_round) == [
        "dk, dv", "dq", "wait", "dk, dv", "gradients start", "dq", "wait",
    ]  # fmt: skip
    assert diary(ring(work)) == [
        "dk, dv", "dq", "wait", "dk, dv", "gradients start", "dq", "wait", "dk, dv", "dq", "wait",
        "gradients start", "wait",
    ]  # fmt: skip
    deferred, some = Deferred(), slice(1, 2)
    assert (
        GradAccumulator(torch.zeros(2, 3, 1), deferred=deferred).samples(some).deferred is deferred
    )


def no_two_parts_leave_something_for_the_same_queries() -> None:
    """Also where nothing is waited for between them."""
    deferred = Deferred()
    program: Any = SimpleNamespace(steps=[((), (), "one part"), ((), (), "another")])
    for part in _parts(program, Any, deferred):
        assert not deferred, part
        deferred.append(lambda: None)


def test_no_two_parts_leave_something_for_the_same_queries():
    no_two_parts_leave_something_for_the_same_queries()


def test_what_is_left_is_done_in_time():
    what_is_left_is_done_in_time()


def nothing_is_left_where_parts_have_their_times(patch: pytest.MonkeyPatch) -> None:
    """Of an observed call."""
    leave_dq(patch)
    left: list[int] = []
    end = observing.Record.end

    def ended(record: observing.Record, part: Part) -> None:
        left.extend(map(len, seen))
        end(record, part)

    class Seen(Deferred):
        def __init__(self) -> None:
            seen.append(self)

    seen: list[Deferred] = []
    fabric = OneStream(SimpleNamespace(rank=0), None, (0,), arranged=(None,), overlap=True)
    program, beside = SimpleNamespace(blocks=(None,)), []
    for record in (None, "a record"):
        patch.setattr(observing._thread, "record", record)
        beside.append(fabric.channel(program, None).overlap)
    assert beside == [True, False]
    patch.setattr(observing._thread, "record", None)
    patch.setattr(observing.Record, "end", ended)
    patch.setattr("ring_attention_pytorch.attention.Deferred", Seen)
    q = torch.randn(1, 6, 2, 4, requires_grad=True)
    with observe():
        ring_attn(q, q, q, kernel="eager").sum().backward()
    assert left == [0]


def test_nothing_is_left_where_parts_have_their_times(monkeypatch):
    nothing_is_left_where_parts_have_their_times(monkeypatch)


def gradients_are_hidden_behind_dq() -> None:
    """So copy engines bring them."""
    four = all_segments("zigzag", 4, 4 * 8192)
    work = Workload(four, four, Mask(causal=True))
    for machine, hidden in ((H200, False), (FIRST, True)):
        assert policy.reduce_by_copy_engine(work, rounds_of(work, 4), JOB, machine, False) == hidden
    few = all_segments("zigzag", 4, 4 * 128)
    work = Workload(few, few, Mask(causal=True))
    assert not policy.reduce_by_copy_engine(work, rounds_of(work, 4), JOB, FIRST, False)


def test_gradients_are_hidden_behind_dq():
    gradients_are_hidden_behind_dq()


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


def plans_tell_transports(patch: pytest.MonkeyPatch) -> None:
    """Of few tokens' own kernel, too; and say so."""

    def main(ring: threads.ThreadRing) -> list[tuple[bool, set[bool]]]:
        q, found = torch.empty(2, 16, 2, 4), []
        differ = torch.tensor([[0] * 16, [1] * 8 + [2] * 8])
        for kernel, documents in (("eager", None), ("sdpa", None), ("eager", differ)):
            plan = RingPlan.make(
                q, q, q, causal=True, layout="zigzag", group=ring, kernel=kernel,
                transport="gather", documents=documents,
            )  # fmt: skip
            assert isinstance(plan.transport.fabric, OneStream)
            ways = (plan, plan.by(plan.chosen.overlapping_transport))
            said = {"while those of queries are computed" in explain_plan(way) for way in ways}
            found.append((plan.transport.fabric.overlap, said))
        return found

    leave_dq(patch)
    patch.setattr(transports, "shared_by", threads.shared_by)
    patch.setattr(prepare, "launches_decide", lambda *_: False)
    want = [(True, {True}), (False, {False}), (True, {True})]
    assert threads.run(2, main)[0] == [want] * 2


def test_plans_tell_transports(monkeypatch):
    plans_tell_transports(monkeypatch)


def few_programs_work_beside_a_kernel(patch: pytest.MonkeyPatch) -> None:
    """On GPUs whose kernels can begin early; elsewhere nothing runs beside them."""
    table = fused_copies.Table(torch.zeros(100, 4, dtype=torch.int64), aligned=16)
    dk = torch.zeros(1, 4, 1, 8)
    board = SimpleNamespace(state=dk, rank=0, patience=0, among={}, device=dk.device)
    barrier = SimpleNamespace(board=board, purpose=0)
    calls: list[tuple[int, bool]] = []

    make = fused_copies.add_up.__wrapped__.__wrapped__
    for able in (False, True):
        patch.setattr(fused_copies, "can_begin_early", lambda device, able=able: able)
        for beside in (False, True):
            call = make(fused_copies.FusedSum(barrier, table, True, beside), dk, dk, dk.dtype)
            calls.append((call.programs, call.constants["EARLY"]))
    assert calls == [
        (100, False),
        (100, False),
        (100, False),
        (fused_copies._PROGRAMS_OVERLAPPING, True),
    ]


@needs_triton
def test_few_programs_work_beside_a_kernel(monkeypatch):
    few_programs_work_beside_a_kernel(monkeypatch)


def dq_is_launched_early(patch: pytest.MonkeyPatch) -> None:
    """Where GPUs can, after a kernel that lets it begin."""
    from ring_attention_pytorch.kernels import triton

    q = torch.randn(1, 4, 2, 8)
    plan, lse = RingPlan.make(q, q, q, kernel="eager"), torch.zeros(1, 2, 4)
    keys = plan.keys(q, q)
    ((_, tiles),) = plan.tiles(keys.segments)
    for able in (False, True):
        patch.setattr(triton, "can_begin_early", lambda device, able=able: able)
        grads = Grads(*(GradAccumulator(q) for _ in range(3)))
        with compile_only() as calls:
            saved = Residuals(q, q, lse, q, None)
            triton.backward(saved, keys, tiles, plan.terms, grads)
        dk, dq = calls.values()
        assert (dk.constants["EARLY"], dq.constants["EARLY"]) == (able, able)
        assert dq.constants.get("launch_pdl", False) == able
        assert "launch_pdl" not in dk.constants


@needs_triton
def test_dq_is_launched_early(monkeypatch):
    dq_is_launched_early(monkeypatch)
