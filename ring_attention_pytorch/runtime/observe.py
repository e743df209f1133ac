"""Observing calls: ranges for profilers, and times of the steps of a call.

    with observe():              plan.run ── watched ──► function(plan)
        loss.backward()              │ Record, of this thread
    plan.statistics()            comm.scheduled_transport ── RecordedCall ──► waits, starts, parts

Off, a call reads a switch and a thread's record, once each. On, it runs without its tape, whose
operations belong to no hop. Recording does not wait for a GPU; only reading the times does.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from ring_attention_pytorch.arguments import checked
from ring_attention_pytorch.runtime.accumulate import Deferred
from ring_attention_pytorch.runtime.streams import capturing, wait_side_streams
from ring_attention_pytorch.schedule.pieces import KVShape
from ring_attention_pytorch.schedule.steps import KEYS, Part, Program, Transfer

WAIT, COMPUTE, START = "wait", "compute", "start"
_NO_CONTEXT = nullcontext()
_lock = threading.Lock()


class _Switch:
    """The number of `observe` blocks that are open in this process."""

    on = int(os.environ.get("RING_ATTENTION_OBSERVE") == "1")


class _Observed(threading.local):
    """The record of the call that runs in this thread."""

    record: "Record | None" = None


switch, observed = _Switch(), _Observed()


@checked
def observe() -> AbstractContextManager[None]:
    """Give calls in this block, in all threads, ranges in profiles, and their plans statistics.

    Ranges are made by `torch.profiler.record_function`, and by NVTX if tensors are on CUDA. The
    environment variable RING_ATTENTION_OBSERVE=1 observes the whole process. Results do not change.
    Calls that tapes would replay take the host longer; calls in CUDA graphs have a range and no
    statistics.

    >>> from ring_attention_pytorch import RingPlan, ring_attn
    >>> q = torch.randn(1, 6, 2, 4)
    >>> plan = RingPlan.make(q, q, q, causal=True)
    >>> with observe():
    ...     _ = ring_attn(q, q, q, plan=plan)
    >>> plan.statistics().forward.hops[0].owners
    (0,)
    """
    return _observing()


@contextmanager
def _observing() -> Iterator[None]:
    with _lock:
        switch.on += 1
    try:
        yield
    finally:
        with _lock:
            switch.on -= 1


def spanned(name: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that is a range of this name inside `observe`."""
    return _Range(name, device) if switch.on else _NO_CONTEXT


class _Range:
    """A context that profilers show under a name."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name, self._function = name, record_function(name)
        self._nvtx = device.type == "cuda"

    def __enter__(self) -> "_Range":
        self._function.__enter__()
        if self._nvtx:
            torch.cuda.nvtx.range_push(self._name)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._nvtx:
            torch.cuda.nvtx.range_pop()
        self._function.__exit__(None, None, None)


class Span(NamedTuple):
    """One action of a call: its kind, its part or transfer, and when it began and ended."""

    what: str  # WAIT, START or COMPUTE
    number: int  # of the transfer, or of the part among the program's
    start: Any  # a mark
    stop: Any


class Record:
    """A recording of one direction of one call on this rank.

    Times are taken on the plan's stream on CUDA, and on the host elsewhere. That stream waits for
    side streams at the end of each part, so recorded calls for two parts do not overlap.
    """

    start: Any  # an event of CUDA, or seconds
    stop: Any

    def __init__(self, plan: Any, direction: str) -> None:
        both = plan.schedule
        self.program: Program = both.backward if direction == "backward" else both.forward
        self.shape: KVShape = plan.chosen.shape
        self.device: torch.device = plan.device
        self.place: int = plan.place
        self.kernel: str = plan.kernel.name
        self.direction: str = direction
        whole = plan.ulysses is None
        self.ranks: Sequence[int] = range(plan.ring.size) if whole else plan.ulysses.ring.places
        self.spans: list[Span] = []
        self._open: list[_Range] = []
        self._computing: Any = None

    def __enter__(self) -> "Record":
        self._before, observed.record = observed.record, self
        self.start = self._mark()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop = self._mark()
        while self._open:  # a call that failed has not ended them
            self._open.pop().__exit__()
        observed.record = self._before

    def owners(self, block: int) -> tuple[int, ...]:
        """Return the ranks whose keys are in a block, the next one behind first."""
        distances = self.program.blocks[block].distances
        return tuple(self.ranks[(self.place - d) % len(self.ranks)] for d in distances)

    def seconds(self, start: Any, stop: Any) -> float:
        """Return the seconds between two marks; waits for the GPU to get there."""
        if isinstance(start, float):
            return stop - start
        stop.synchronize()
        return 1e-3 * start.elapsed_time(stop)

    def transfer(self, what: str, number: int, do: Callable[[int], None]) -> None:
        """Start a transfer or wait for it, and note when."""
        start = self._mark()
        with _Range(self._name_of(what, self.program.transfers[number]), self.device):
            do(number)
        self.spans.append(Span(what, number, start, self._mark()))

    def begin(self, part: Part) -> None:
        """Begin a part: its kernel calls follow."""
        keys = f"keys of {_ranks(self.owners(part.block))}"
        name = f"ring attention, hop {part.block}: {keys}, kernel {self.kernel}"
        self._open.append(_Range(name, self.device))
        self._open[-1].__enter__()
        self._computing = self._mark()

    def end(self, part: Part) -> None:
        """Note that all calls for a part have been launched."""
        self._open.pop().__exit__()
        wait_side_streams(self.device)  # otherwise a later wait would be charged with their work
        number = self.program.parts.index(part)
        self.spans.append(Span(COMPUTE, number, self._computing, self._mark()))

    def _name_of(self, what: str, transfer: Transfer) -> str:
        begins = what == START
        if transfer.kind == KEYS:
            of = f"hop {transfer.block}: keys of {_ranks(self.owners(transfer.block))} "
            return f"ring attention, {of}{'start' if begins else 'are waited for'}"
        block = transfer.source if begins else transfer.block
        whose = f"gradients of keys of {_ranks(self.owners(block))}"
        home = transfer.block == 0
        if begins:
            return f"ring attention, hop {block}: {whose} go {'home' if home else 'on'}"
        return f"ring attention, hop {block}: {whose} {'come home' if home else 'come'}"

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class RecordedCall:
    """A transport's call whose steps are recorded; deferred work is run within its part."""

    def __init__(self, record: Record, call: Any, deferred: Deferred | None) -> None:
        self._record, self._call, self._deferred = record, call, deferred
        self.grads = call.grads

    def start(self, number: int) -> None:
        self._record.transfer(START, number, self._call.start)

    def wait(self, number: int) -> None:
        self._record.transfer(WAIT, number, self._call.wait)

    def keys(self, part: Part) -> Any:
        self._record.begin(part)
        return self._call.keys(part)

    def computed(self, part: Part) -> None:
        if self._deferred:
            self._deferred.do()
        self._record.end(part)
        self._call.computed(part)


def are_timed() -> bool:
    """True if the parts of this thread's call are timed: nothing must overlap them."""
    return observed.record is not None


def watched(
    plan: Any, direction: str, function: Callable[..., Any], given: tuple[Tensor | None, ...]
) -> Any:
    """Return `function(plan, *given)`, and store a record of it in the plan."""
    plan.records.pop(direction, None)
    with _Range(f"ring attention, {direction}", plan.device):
        if plan.device.type == "cuda" and capturing(plan.device):
            return function(plan, *given)
        with Record(plan, direction) as record:
            results = function(plan, *given)
    plan.records[direction] = record
    return results


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
