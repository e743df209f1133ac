"""A call carries out a program: it waits, starts transfers and hands out keys, step by step.

A transport is its own schedule and its own kind of `Call`: that knows where keys and gradients are.
The order is the program's alone, and a fabric carries the bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from ring_attention_pytorch.comm.fabric import Fabric, KVGrads
from ring_attention_pytorch.runtime.deferred import Deferred
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.runtime.observe import recorded
from ring_attention_pytorch.schedule.steps import Part, Program, Schedule


class Call(Protocol):
    """One rank's part in one call, with the blocks that are here. Transfers go by numbers."""

    def start(self, number: int) -> None:
        """Start a transfer; all ranks do."""

    def wait(self, number: int) -> None:
        """Let what follows wait for a transfer: for keys, or for gradients that are added."""

    def keys(self, part: Part) -> KVBlock:
        """Return the keys of a part."""
        ...

    def grads(self, part: Part, keys: KVBlock) -> KVGrads:
        """Return accumulators (dk, dv) for these keys of a part."""
        ...

    def computed(self, part: Part) -> None:
        """Take note that calls for a part have been launched."""


@dataclass(frozen=True)
class ScheduledTransport:
    """A transport that carries out its schedule; a subclass says what its calls are.

    All ranks take the same steps in the same order. So whether there is a message never depends on
    the rank.
    """

    schedule: Schedule
    fabric: Fabric

    def call(self, program: Program, own: KVBlock, totals: KVGrads | None = None) -> Call:
        """Begin a call with own keys; `totals` are the accumulators of their gradients, if back."""
        raise NotImplementedError

    def stream(self, own_keys: KVBlock) -> Iterator[KVBlock]:
        """Yield the keys of each part: own ones, then all others that anyone needs."""
        program = self.schedule.forward
        call = recorded(self.call(program, own_keys))
        try:
            for part in _parts(program, call):
                keys = call.keys(part)
                if program.counts(part, keys.segments):
                    yield keys
                del keys  # else they would stay while more come
                call.computed(part)
        except BaseException:
            self.fabric.drain()  # nothing else uses memory that is still written
            raise

    def stream_back(
        self, own_keys: KVBlock, own: KVGrads, deferred: Deferred | None = None
    ) -> Iterator[tuple[KVBlock, KVGrads]]:
        """Yield the keys of each part, with accumulators (dk, dv) for their gradients.

        When the stream ends, `own`, those of own keys, have what every rank added. What a kernel
        leaves for `deferred` is done while its gradients travel, or left for whoever asked.
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
    """Yield the parts; do what a kernel left for `deferred` before anything is waited for.

    Its gradients have started by then, if there is nothing else to wait for before that. It is done
    before the next part, too: no two parts have something left for the same queries.
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
