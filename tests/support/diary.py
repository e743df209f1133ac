"""Each rank's actions in a ring of threads, in order: exchanges, barriers, uses of slots.

Two properties of such diaries are enough for many machines that share memory inside:

- All ranks' are equal. Then nobody waits in vain: every rank has come to the earliest exchange or
  barrier that is not over yet, and waits for nothing before it.
- Between two barriers of a machine nobody writes a slot that another rank reads. What ranks do in
  two such epochs is in order, on whatever streams; what they do in one is not.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import permutations
from typing import NamedTuple
from unittest import mock

from torch import Tensor

from ring_attention_pytorch.comm import fabric_copies
from ring_attention_pytorch.comm.messages import Form
from ring_attention_pytorch.ranks.ring import Messages
from tests.support import threads
from tests.support.threads import ThreadBuffer, ThreadRing, ThreadTransfer


class Use(NamedTuple):
    """One use of a slot by a rank, from the first of its machine's epochs to the last."""

    slot: int  # its address
    rank: int  # of the ring
    writes: bool
    first: int
    last: int


class Diaries:
    """The diaries of all ranks of one run."""

    def __init__(self, size: int) -> None:
        self.lines: list[list[str]] = [[] for _ in range(size)]
        self.epochs = [0] * size
        self.uses: list[Use] = []
        self.own = threading.local()

    def of(self, ring: ThreadRing) -> None:
        """Begin this thread's."""
        self.own.rank, self.own.written = ring.rank, dict[str, tuple[int, int]]()

    def clashes(self) -> list[tuple[Use, Use]]:
        """Return all writes of a slot in an epoch in which another rank reads it."""
        return [
            (one, other)
            for one, other in permutations(self.uses, 2)
            if one.slot == other.slot and one.rank != other.rank and one.writes > other.writes
            if one.first <= other.last and other.first <= one.last
        ]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep them, in this block. Copies and sums on side streams come as late as they may."""
        with ExitStack() as stack:
            for name, make in (
                ("publish", self._barrier), ("wait_for_readers", self._barrier),
                ("write_view", self._opening),
            ):  # fmt: skip
                wrapped = make(getattr(ThreadBuffer, name), name)
                stack.enter_context(mock.patch.object(ThreadBuffer, name, wrapped))
            for name in ("_copy", "add_"):
                late = self._late(getattr(fabric_copies, name))
                stack.enter_context(mock.patch.object(fabric_copies, name, late))
            posting = self._posting(ThreadRing.exchange)
            stack.enter_context(mock.patch.object(ThreadRing, "exchange", posting))
            yield

    def _write(self, line: str) -> int:
        self.lines[self.own.rank].append(line)
        return self.epochs[self.own.rank]

    def _barrier(
        self, meet: Callable[[ThreadBuffer], None], name: str
    ) -> Callable[[ThreadBuffer], None]:
        def barrier(buffer: ThreadBuffer) -> None:
            epoch = self._write(f"{buffer.name}: {name}")
            if buffer.name in self.own.written:
                slot, first = self.own.written.pop(buffer.name)
                self.uses.append(Use(slot, self.own.rank, True, first, epoch))
            self.epochs[self.own.rank] += 1
            meet(buffer)

        return barrier

    def _opening(
        self, view: Callable[[ThreadBuffer, Form], list[Tensor]], _: str
    ) -> Callable[[ThreadBuffer, Form], list[Tensor]]:
        def write_view(buffer: ThreadBuffer, form: Form) -> list[Tensor]:
            found = view(buffer, form)
            epoch = self._write(f"{buffer.name}: slot {buffer.slot}")
            memory = buffer.hub.buffers[buffer.name, buffer.rank]
            self.own.written[buffer.name] = memory[buffer.slot].data_ptr(), epoch
            return found

        return write_view

    def _late(self, do: Callable[..., object]) -> Callable[..., None]:
        def launch(place: Tensor, *parts: Tensor, **how: bool) -> None:
            buffer, first = threads._beside.buffer, self.epochs[self.own.rank]
            assert buffer is not None

            def run() -> None:
                for slot in _slots(buffer, parts):
                    last = self.epochs[self.own.rank]
                    self.uses.append(Use(slot, self.own.rank, False, first, last))
                do(place, *parts, **how)

            buffer.told.append(run)

        return launch

    def _posting(self, exchange: Callable[..., ThreadTransfer]) -> Callable[..., ThreadTransfer]:
        def post(ring: ThreadRing, sends: Messages, receives: Messages) -> ThreadTransfer:
            found = exchange(ring, sends, receives)
            number, wait = ring.hub.exchanges[ring.rank], found.wait
            self._write(f"exchange {number} begins")

            def end() -> list[Tensor]:
                self._write(f"wait for exchange {number}")
                return wait()

            found.wait = end
            return found

        return post


def _slots(buffer: ThreadBuffer, parts: Sequence[Tensor]) -> Iterator[int]:
    """Yield the addresses of the slots in which these tensors begin."""
    starts = [part.data_ptr() for part in parts if part.numel()]
    for memory in buffer.hub.buffers.values():
        for slot in memory:
            first = slot.data_ptr()
            if any(first <= start < first + slot.nbytes for start in starts):
                yield first
