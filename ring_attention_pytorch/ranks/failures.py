"""Failures of a rank, as its peers see them: errors that name who waited, and bounded waits."""

import contextlib
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from types import FrameType
from typing import NamedTuple, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.constants import default_pg_timeout

from ring_attention_pytorch.arguments import checked
from ring_attention_pytorch.ranks import failure_reports
from ring_attention_pytorch.ranks.guard import Guard

_LONGEST = 300  # characters of a backend's message
# stack frames of files that start with these are not the caller's
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_PASSED_BY = (_PACKAGE, os.path.dirname(torch.__file__), contextlib.__file__, "<")
# when a message times out, gloo closes all connections of a group, and NCCL ends the process
NEW_GROUP = (
    "the connections of this group are closed now, for all that uses it, and no plan mends them: "
    "to go on, all ranks make a new group, or start again"
)

AgreementCount = tuple[ProcessGroup | None, int]  # a group, and the number of its agreements


def call_site(frame: FrameType | None = None) -> str:
    """Return where this library was called, as "at train.py:31"; empty if no caller is found.

    `frame` is another thread's; by default the caller's is used.
    """
    frame = frame or sys._getframe(1)
    while frame is not None:
        if name := _caller(frame.f_code.co_filename):
            return f"at {name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@lru_cache(maxsize=1024)
def _caller(path: str) -> str:
    """Return the name of a file that calls this library; empty for frames to skip."""
    return "" if path.startswith(_PASSED_BY) else os.path.basename(path)


def by_value(values: Sequence) -> dict[object, list[int]]:
    """List the ranks that have each value, in order of appearance."""
    found: dict[object, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        found[value].append(rank)
    return found


def ranks_of(ranks: Sequence[int]) -> str:
    """Name ranks in words.

    >>> ranks_of([2]), ranks_of([0, 2])
    ('rank 2', 'ranks 0, 2')
    """
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def printable(text: str) -> str:
    """Escape control characters and those that can't be encoded: peers may have sent them.

    >>> printable("one\\x1b[2Jtwo")
    'one\\\\x1b[2Jtwo'
    """
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


class Disagreement(ValueError):
    """An error that ranks found together: all raise the same text, and the ring stays usable."""

    def __init__(self, text: str = "") -> None:
        super().__init__(printable(text))


class Step(NamedTuple):
    """A point in a ring's work: an exchange within a call.

    >>> print(Step("ring attention, backward", plan=2, call=7, hop=1))
    ring attention, backward: call 7 by plan 2, hop 1
    >>> print(Step("ring attention, backward", 2, 7, 1, back_of=5 << 32 | 3))
    ring attention, backward of call 3 since agreement 5: call 7 by plan 2, hop 1
    """

    operation: str  # and its direction
    plan: int  # its number; 0 without one
    call: int  # number in the ring, since the last agreement
    hop: int  # exchanges of this call so far
    # the call that this one differentiates: the number of agreements before it << 32 | its number
    back_of: int | None = None

    def __str__(self) -> str:
        plan, of = f" by plan {self.plan}" if self.plan else "", ""
        if self.back_of is not None:
            since, call = divmod(self.back_of, 1 << 32)
            of = f" of call {call} since agreement {since}"
        return f"{self.operation}{of}: call {self.call}{plan}, hop {self.hop}"


class Waiting(NamedTuple):
    """A wait of an exchange for the messages of some ranks.

    >>> print(Waiting(Step("ring attention, forward", plan=2, call=7, hop=1), [2, 0, 2]))
    ring attention, forward: call 7 by plan 2, hop 1: waits for ranks 0, 2
    """

    step: Step
    ranks: Sequence[int]

    def __str__(self) -> str:
        return f"{self.step}: waits for {ranks_of(sorted({*self.ranks}))}"


class RingError(RuntimeError):
    """A failed exchange between ranks; its cause is the transport's error.

    Attributes:
        step: the exchange that this rank was in; None outside of any.
        ranks: the ranks of the group that it waited for.
    """

    def __init__(self, text: str, step: Step | None = None, ranks: Sequence[int] = ()):
        super().__init__(printable(text))
        self.step: Step | None = step
        self.ranks: tuple[int, ...] = tuple(ranks)

    @classmethod
    def waiting(
        cls,
        step: Step,
        ranks: Sequence[int],
        cause: BaseException,
        count: AgreementCount = (None, 0),
        seconds: float = 0.0,
    ) -> "RingError":
        """Make the error of a wait that ended with `cause`; in `fail_together` notify the peers.

        `seconds` is how long it has lasted.
        """
        ranks = sorted({*ranks})
        if (group := count[0]) is not None:
            closed.add(group)
        waits = f"waits in {step} {call_site()} for {ranks_of(ranks)} since {_clock(seconds)}"
        failure_reports.write(*count, waits, ranks)
        notify_peers()
        words = failure_reports.read(*count, ranks)
        told = [f"rank {rank} {text.rstrip('.')}" for rank, text in words.lines.items()]
        if words.silent:
            told.append(f"{ranks_of(words.silent)}: no word: failed, late, or in no such call")
        if words.awaited:
            told.append("so this rank came too late for them, or to another call")
        if not words.store:
            told.append("the store with the ranks' words did not answer: who has it may be lost")
        text = f"{step}: waited for {ranks_of(ranks)}, {_why(cause)}. {'; '.join(told)}. "
        return cls(f"{text}{_advice(step, words.lines)}; {NEW_GROUP}", step, ranks)


class Missing(RuntimeError):
    """An exchange over the host which `ranks` did not reach; empty means all of them."""

    def __init__(self, text: str, ranks: Iterable[int]) -> None:
        super().__init__(text)
        self.ranks: tuple[int, ...] = tuple(ranks)


def _clock(seconds: float) -> str:
    """Return the time of day, so many seconds ago."""
    return time.strftime("%H:%M:%S UTC", time.gmtime(time.time() - seconds))


def _why(cause: BaseException) -> str:
    """Describe why a wait ended.

    >>> _why(RuntimeError("[/gloo/buffer.cc:129] Timed out waiting 3000ms for send operation"))
    'in vain for 3 s'
    """
    said = " ".join(str(cause).split())
    if waited := re.search(r"Timed out waiting (\d+)ms", said):
        return f"in vain for {int(waited[1]) / 1000:g} s"
    if re.search(r"Connection (closed|reset|refused)|Broken pipe", said):
        return "and the connection was closed: a process has ended, or failed and closed it"
    return f"and the transport failed: {said.split('. ')[0][:_LONGEST]}"


def _advice(step: Step, words: Mapping[int, str]) -> str:
    found = [re.search(r"by plan (\d+)", text) for text in words.values()]
    plans = {match[1] for match in found if match is not None}
    if step.plan and plans - {str(step.plan)}:
        if step.operation.endswith("to a cache"):
            return (
                "Ranks must ask the same, of caches to which all have done the same; "
                "RING_ATTENTION_CHECK=always tells who has not"
            )
        return f"Ranks must be given the same plan; this one has number {step.plan}"
    if step.operation.endswith("backward") and not words:
        return "Each rank must call backward(), of a loss that depends on its part of the result"
    return "All ranks must make the same calls; RING_ATTENTION_CHECK=always tells where"


def timeout_of(group: ProcessGroup | None) -> timedelta:
    """Return how long a group's ranks wait for one another; PyTorch's default if it is unknown."""
    if group is None:
        return default_pg_timeout
    timeouts = []
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:  # not all backends have some
            timeouts.append(options._timeout)
    return min(timeouts, default=default_pg_timeout)


class Closable(Protocol):
    """Connections outside of a process group, closed together with it."""

    def close(self) -> None: ...


_groups: WeakSet[ProcessGroup] = WeakSet()  # groups over which ranks exchange anything
closed: WeakSet[ProcessGroup] = WeakSet()  # groups in which a wait of this rank has failed
guards: WeakSet[Guard] = WeakSet()  # of devices that can notify peers at once
links: WeakSet[Closable] = WeakSet()  # of groups whose ranks share a host
inherited: WeakSet[ProcessGroup] = WeakSet()  # groups of the process that forked this one
_blocks = 0  # open blocks of fail_together


def known(group: ProcessGroup) -> ProcessGroup:
    """Register a group with `fail_together`, and return it.

    Raises:
        RingError: this process inherited the group by a fork.
    """
    if inherited and (group in inherited or _world() in inherited):
        raise RingError(
            "this process was forked from one that had a process group, whose connections it "
            "can't use: start processes with 'spawn' or 'forkserver', or call this in the parent"
        )
    _groups.add(group)
    return group


def _world() -> ProcessGroup | None:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _remember_groups() -> None:
    for each in [*links]:  # otherwise peers would not notice the end of the parent
        each.close()
    inherited.update(_groups)
    if (world := _world()) is not None:
        inherited.add(world)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_remember_groups)


@checked
def fail_together() -> AbstractContextManager[None]:
    """Make all ranks fail as soon as one does, instead of after their groups' timeout.

    An error in this block, or in a ring's call within it, ends all that the process's groups have
    in flight. Ranks that wait for this one raise `RingError` at once, and so do ranks that wait for
    them. These groups can't be used any more: a process that goes on makes new ones.

    >>> with fail_together():  # around all that a rank does
    ...     pass
    """
    return _failing_together()


@contextmanager
def _failing_together() -> Iterator[None]:
    global _blocks
    _blocks += 1
    try:
        yield
    except BaseException:
        notify_peers()
        raise
    finally:
        _blocks -= 1


def notify_peers() -> None:
    """In a block of `fail_together`, end all that is in flight in all groups."""
    if not _blocks:
        return
    for guard in [*guards]:
        with suppress(RuntimeError):  # the device itself may have failed
            guard.fail()
    for each in [*links]:
        each.close()
    groups = [*_groups]
    world = _world()
    if world is not None:
        groups.append(world)
    for group in groups:
        config = str(dist.get_backend_config(group))
        if "gloo" in config:
            _close(group)
        if "nccl" in config:
            group.abort()


def _close(group: ProcessGroup) -> None:
    """Close a gloo group's connections, which ends all waits for them, here and on other ranks.

    gloo has no abort. But a message that times out closes all connections.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):  # no message came, or the connection is closed already
                group.recv([torch.empty(1)], peer, 0).wait(timedelta(milliseconds=1))
