"""A call carries out a program: it waits, starts transfers and hands out keys, step by step.

A transport has its own schedule and its own kind of `Call`, which stores keys and gradients. Only
the program decides the order, and a fabric moves the bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from ring_attention_pytorch.comm.fabric import Fabric, KVGrads
from ring_attention_pytorch.runtime.accumulate import Deferred
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.runtime.observe import recorded
from ring_attention_pytorch.schedule.steps import Part, Program, Schedule


class Call(Protocol):
    """One rank's part in one call, with its blocks on this rank. Transfers are numbered."""

    def start(self, number: int) -> None:
        """Start a transfer; all ranks do."""

    def wait(self, number: int) -> None:
        """Make later work wait for a transfer: of keys, or of gradients, which are then added."""

    def keys(self, part: Part) -> KVBlock:
        """Return the keys of a part."""
        ...

    def grads(self, part: Part, keys: KVBlock) -> KVGrads:
        """Return accumulators (dk, dv) for these keys of a part."""
        ...

    def computed(self, part: Part) -> None:
        """Note that calls for a part have been launched."""


@dataclass(frozen=True)
class ScheduledTransport:
    """A transport that runs the program of its schedule; a subclass implements its calls.

    All ranks take the same steps in the same order. Whether a message exists therefore never
    depends on the rank.
    """

    schedule: Schedule
    fabric: Fabric

    def __deepcopy__(self, memo: dict[int, Any]) -> "ScheduledTransport":
        """Return this very object: ranks share its memory, of which no rank can make a copy."""
        return self

    def call(self, program: Program, own: KVBlock, totals: KVGrads | None = None) -> Call:
        """Begin a call with own keys; `totals` are the accumulators of their gradients, if back."""
        raise NotImplementedError

    def stream(self, own_keys: KVBlock) -> Iterator[KVBlock]:
        """Yield the keys of each part: own ones, then all others that any rank needs."""
        program = self.schedule.forward
        call = recorded(self.call(program, own_keys))
        try:
            for part in _parts(program, call):
                keys = call.keys(part)
                if program.counts(part, keys.segments):
                    yield keys
                del keys  # frees them before more arrive
                call.computed(part)
        except BaseException:
            self.fabric.drain()  # memory in flight is reused by nothing else
            raise

    def stream_back(
        self, own_keys: KVBlock, own: KVGrads, deferred: Deferred | None = None
    ) -> Iterator[tuple[KVBlock, KVGrads]]:
        """Yield the keys of each part, with accumulators (dk, dv) for their gradients.

        When the stream ends, `own`, the gradients of own keys, contain all ranks' parts. Work
        that a kernel has `deferred` runs while its gradients travel, or is left to the caller.
        """
        program = self.schedule.backward
        call = recorded(self.call(program, own_keys, own), deferred)
        try:
            for part in _parts(program, call, deferred):
                keys = call.keys(part)
                grads = call.grads(part, keys)
                if program.counts(part, keys.segments):
                    yield keys, grads
                del keys, grads
                call.computed(part)
        except BaseException:
            self.fabric.drain()
            raise


def _parts(program: Program, call: Call, deferred: Deferred | None = None) -> Iterator[Part]:
    """Yield the parts; run work that a kernel `deferred` before any wait.

    Its gradients have started by then, unless that start needs a wait itself. Deferred work also
    runs before the next part: no two parts may defer work for the same queries.
    """
    for wait, start, part in program.steps:
        if wait and deferred:
            deferred.do()
        for number in wait:
            call.wait(number)
        for number in start:
            call.start(number)
        if part is not None:
            if deferred:
                deferred.do()
            yield part
