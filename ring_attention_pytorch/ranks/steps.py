"""Numbers of a ring's calls and exchanges: they differ on a rank that is out of step."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self
from weakref import ref
from zlib import crc32

from torch.distributed import ProcessGroup

from ring_attention_pytorch.ranks import failure_reports
from ring_attention_pytorch.ranks.failures import (
    NEW_GROUP,
    Disagreement,
    RingError,
    Step,
    guards,
    notify_peers,
)
from ring_attention_pytorch.ranks.guard import Guard

BROKEN = "broken"  # note of a rank whose ring is broken, once the reason has been reported
_NEXT_PLAN = (
    "it is whole again once all ranks make a plan, or call without one; if others waited for this "
    "one in vain, their group's connections are closed, and all make a new group"
)


class Steps:
    """The numbers of a ring's calls and exchanges, and its state after one has failed.

    Messages between two ranks match by these numbers where the backend compares tags (gloo does,
    NCCL does not). A message of a call that a rank has skipped, or made with another plan,
    therefore never matches one of its next call. All rings of a group agree together, and restart
    their numbers there.
    """

    def __init__(
        self, met: list[int] | None = None, group: "ref[ProcessGroup] | None" = None
    ) -> None:
        self._group = group  # its ranks wait for one that fails
        self._met = [0] if met is None else met  # agreements so far, in all rings of a group
        self._since = 0
        self.calls: int = 0
        self.hops: int = 0  # exchanges of this call so far
        self._base: int | None = 0  # seed of the tags of this call
        # number of the plan, the operation, and the number of the call that it differentiates
        self.about: tuple[int, str, int | None] = (0, "no call", None)
        self.broken: str | None = None  # why it is broken, until the next agreement
        self.under_way: list[object] = []  # transfers not yet waited for
        self._left: list[object] = []  # transfers of a call that failed
        self.guards: list[Guard] = []  # checks that devices make
        # callers that agree no more until a batch's block ends: an error of one rank is its own
        self.passed_by: set[str] = set()
        self.unread: Any = None  # a batch's digest, which the next agreement compares

    @property
    def notes(self) -> int:
        """The number of the group's agreements so far."""
        return self._met[0]

    @notes.setter
    def notes(self, number: int) -> None:
        self._met[0] = number

    @property
    def now(self) -> Step:
        """The exchange and call that this rank is in."""
        plan, operation, back_of = self.about
        return Step(operation, plan, self.calls, self.hops, back_of)

    @property
    def number(self) -> int:
        """The number of the last call; a call that differentiates it is `back_of` this number."""
        return Step.number(self._since, self.calls)

    def begin(self, operation: str, plan: int, back_of: int | None) -> Self:
        """Begin another call; the call is the block of the returned object.

        Arguments are as for `Ring.call`. If it fails, this ring is broken on this rank. A
        `Disagreement` does not break it: all ranks raise one together, and their numbers still
        match.

        Raises:
            RingError: an earlier call has failed, so incoming messages are not for this one.
        """
        if self.guards or self.broken is not None or self._since != self._met[0]:
            self._check()
        self.calls, self.hops, self.about = self.calls + 1, 0, (plan, operation, back_of)
        self._base = None  # few calls send messages
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and not isinstance(error, Disagreement):
            self._break(error)
            notify_peers()

    def tag(self) -> int:
        """Return the tag of the next messages, a positive number of 31 bits."""
        self._check()
        self.hops += 1
        if self._base is None:
            self._base = crc32(repr((self._since, self.calls, self.about)).encode())
        return crc32(self.hops.to_bytes(4, "little"), self._base) >> 1

    def compare(self, subject: str) -> str:
        """Begin an agreement on `subject`; return this rank's failure, "" if there is none."""
        self.notes += 1
        self._since, self.calls, self.hops, self._base = self._met[0], 0, 0, None
        self.about = (0, f"comparing notes on {subject}", None)
        if self.broken is not None:
            return BROKEN
        return self.trouble() or "" if self.guards else ""

    def trouble(self) -> str | None:
        """Return a failure that a device has flagged and no rank has reported; or None."""
        if self.broken is not None:
            return None
        for guard in self.guards:
            told = guard.trouble()
            if told:
                return told
        return None

    def watch(self, guard: Guard) -> None:
        """Check this guard before each call, and let it notify peers when this rank fails."""
        self.guards.append(guard)
        guards.add(guard)

    def report_failure(self, words: str) -> None:
        """Write a report for ranks that will wait for this one in vain."""
        group = None if self._group is None else self._group()
        failure_reports.write(group, self.notes, words)

    def clear_failure(self, barrier: Callable[[], object]) -> None:
        """Clear a failure that notes have reported: reset the GPUs' flags between two barriers.

        All ranks call this together; `barrier` is the barrier.
        """
        for guard in self.guards:
            guard.wait()
        barrier()
        for guard in self.guards:
            guard.reset()
        barrier()
        self.broken = None

    def _break(self, error: BaseException) -> None:
        if self.broken is not None:  # by a call within this one
            return
        self.broken = f"{self.now}: {type(error).__name__}: {error}"
        if not isinstance(error, RingError):  # it has been reported already
            self.report_failure(f"raised {type(error).__name__} in {self.now}: {error}")
        for guard in self.guards:
            with suppress(RuntimeError):  # the device itself may have failed
                guard.fail()
        # gloo's buffers must live until transfers in flight have arrived
        self._left, self.under_way = self.under_way, []

    def _check(self) -> None:
        """Raise if the ring is broken; restart the numbers if another of the group has agreed."""
        if self.guards and (trouble := self.trouble()) is not None:
            self.broken = f"{self.now}: {trouble}"
        if self.broken is not None:
            text = f"this ring is broken on this rank since a call failed ({self.broken})"
            raise RingError(text if NEW_GROUP in text else f"{text}; {_NEXT_PLAN}", self.now)
        if self._since != self._met[0]:
            self._since, self.calls, self.hops, self._base = self._met[0], 0, 0, None
