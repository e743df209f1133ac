"""A call carries out a program: it waits, starts transfers and hands out keys, step by step.

A transport has its own schedule and its own kind of `Call`, which stores keys and gradients. Only
the program decides the order, and a fabric moves the bytes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from ring_attention_pytorch.comm.fabric import Fabric, KVGrads
from ring_attention_pytorch.runtime.accumulate import Deferred
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.runtime.observe import RecordedCall, observed
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
    """A transport that runs the program of its schedule, by calls of its `call_type`.

    That is made of the transport, a program, own keys, and backward of the accumulators of their
    gradients.

    All ranks take the same steps in the same order. Whether a message exists therefore never
    depends on the rank.
    """

    call_type: ClassVar[Callable[..., Call]]

    schedule: Schedule
    fabric: Fabric

    def __deepcopy__(self, memo: dict[int, Any]) -> "ScheduledTransport":
        """Return this very object: ranks share its memory, of which no rank can make a copy."""
        return self

    def stream(self, own_keys: KVBlock) -> Iterator[KVBlock]:
        """Yield the keys of each part: own ones, then all others that any rank needs."""
        for keys, _ in self._run(self.schedule.forward, own_keys):
            yield keys
            del keys  # frees them before more arrive

    def stream_back(
        self, own_keys: KVBlock, own: KVGrads, deferred: Deferred | None = None
    ) -> Iterator[tuple[KVBlock, KVGrads | Any]]:
        """Yield the keys of each part, with accumulators (dk, dv) for their gradients.

        When the stream ends, `own`, the gradients of own keys, contain all ranks' parts. Work
        that a kernel has `deferred` runs while its gradients travel, or is left to the caller.
        """
        return self._run(self.schedule.backward, own_keys, own, deferred)

    def _run(
        self,
        program: Program,
        own_keys: KVBlock,
        own: KVGrads | None = None,
        deferred: Deferred | None = None,
    ) -> Iterator[tuple[KVBlock, KVGrads | None]]:
        """Yield the keys of each part, backward with accumulators for `own` and others' gradients.

        Work that a kernel `deferred` runs before any wait. Its gradients have started by then,
        unless that start needs a wait itself. It also runs before the next part: no two parts may
        defer work for the same queries.
        """
        call = self.call_type(self, program, own_keys, own)
        if observed.record is not None:
            call = RecordedCall(observed.record, call, deferred)
        try:
            for wait, start, part in program.steps:
                if wait and deferred:
                    deferred.do()
                for number in wait:
                    call.wait(number)
                for number in start:
                    call.start(number)
                if part is None:
                    continue
                if deferred:
                    deferred.do()
                keys = call.keys(part)
                grads = None if own is None else call.grads(part, keys)
                # a whole block is computed, too, if its owner has no keys
                if keys.segments or program.blocks[part.block].whole:
                    yield keys, grads
                del keys, grads  # frees them before more arrive
                call.computed(part)
        except BaseException:
            self.fabric.drain()  # memory in flight is reused by nothing else
            raise
