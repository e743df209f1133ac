"""A ring of ranks that exchange tensors: its members, its calls, and all point-to-point code.

A rank that compiles, loads or writes while others wait for it looks like one that hangs. Each long
wait of the host is therefore logged while it lasts.
"""

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property, partial
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary, ref
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ring_attention_pytorch.ranks import failure_reports
from ring_attention_pytorch.ranks.alone import in_one_process
from ring_attention_pytorch.ranks.failure_reports import logger
from ring_attention_pytorch.ranks.failures import (
    NEW_GROUP,
    AgreementCount,
    Disagreement,
    Missing,
    RingError,
    Step,
    Waiting,
    call_site,
    closed,
    guards,
    inherited,
    known,
    notify_peers,
    timeout_of,
)
from ring_attention_pytorch.ranks.guard import Guard, Stamps
from ring_attention_pytorch.ranks.machines import numbered
from ring_attention_pytorch.ranks.meshes import group_of
from ring_attention_pytorch.ranks.notes import (
    FIRST,
    close_links,
    exchange,
    gather_over_gloo,
    link,
    links_of,
    machines_of,
    missing,
    unreadable,
)
from ring_attention_pytorch.runtime.rowwise import has_triton

Messages = Sequence[tuple[int, Tensor]]  # rank of a ring, and its tensor to send or receive into
_NO_CONTEXT = nullcontext()
_TAGS = (1 << 31) - 1  # bits of a tag
_SUMMED = 1 << 19  # squares of so many numbers are summed exactly over 2 ** 15 ranks

BROKEN = "broken"  # note of a rank whose ring is broken, once the reason has been reported
_NEXT_PLAN = (
    "it is whole again once all ranks make a plan, or call without one; if others waited for this "
    "one in vain, their group's connections are closed, and all make a new group"
)
_LONG = 15.0  # seconds after which a wait of the host is logged, and again whenever it doubles


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
        self.now: Step = Step("no call", plan=0, call=0, hop=0)
        self.number: int = 0  # of the last call; one that differentiates it is `back_of` this
        self._base: int | None = None  # seed of the tags of this call
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

    @contextmanager
    def begin(self, operation: str, plan: int, back_of: int | None) -> Iterator[None]:
        """Make another call in this block.

        Arguments are as for `Ring.call`. If it fails, this ring is broken on this rank. A
        `Disagreement` does not break it: all ranks raise one together, and their numbers still
        match.

        Raises:
            RingError: an earlier call has failed, so incoming messages are not for this one.
        """
        if self.guards or self.broken is not None or self._since != self._met[0]:
            self._check()
        self.now = Step(operation, plan, self.now.call + 1, 0, back_of)
        self.number, self._base = self._since << 32 | self.now.call, None
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Disagreement):
                self._break(error)
                notify_peers()
            raise

    def tag(self) -> int:
        """Return the tag of the next messages, a positive number of 31 bits."""
        if self.guards or self.broken is not None or self._since != self._met[0]:
            self._check()
        operation, plan, call, hop, back_of = self.now
        self.now = Step(operation, plan, call, hop + 1, back_of)
        if self._base is None:  # few calls send messages
            self._base = crc32(repr((self._since, call, plan, operation, back_of)).encode())
        return crc32(self.now.hop.to_bytes(4, "little"), self._base) >> 1

    def compare(self, subject: str) -> str:
        """Begin an agreement on `subject`; return this rank's failure, "" if there is none."""
        self.notes += 1
        self._restart(Step(f"comparing notes on {subject}", plan=0, call=0, hop=0))
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
            self._restart(self.now._replace(call=0, hop=0))

    def _restart(self, now: Step) -> None:
        """Count calls from the last agreement."""
        self._since, self.now, self._base = self._met[0], now, None
        self.number = self._since << 32


# the number of a group's agreements, and the steps of each of its rings
_steps: WeakKeyDictionary[ProcessGroup, tuple[list[int], dict[tuple[int, int], Steps]]] = (
    WeakKeyDictionary()
)


Awaited = Callable[[], tuple[Step, Sequence[int], AgreementCount]]


@contextmanager
def awaiting(of: Awaited) -> Iterator[None]:
    """Wait for ranks in this block: a long wait is logged, and its errors are `RingError`s.

    `of` returns the step, the ranks and the count. It is called only for an error, or for a wait so
    long that it is logged. Entering and leaving take about two microseconds.
    """
    start = time.monotonic()
    waits.since[of] = start, threading.get_ident()
    if waits.thread is None:
        waits.start()
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RingError):
            raise
        step, ranks, count = of()
        absent = error.ranks if isinstance(error, Missing) else ()
        seconds = time.monotonic() - start
        raise RingError.waiting(step, absent or ranks, error, count, seconds) from error
    finally:
        waits.since.pop(of, None)


class Waits:
    """The waits of this process's threads for other ranks. Long ones are logged while they last.

    `since` maps each wait to its start and its thread. A separate thread logs the long ones.
    """

    def __init__(self, seconds: float = _LONG) -> None:
        self._seconds = seconds
        self.since: dict[Awaited, tuple[float, int]] = {}
        self._due: dict[Awaited, float] = {}  # seconds until the next report of each that lasts
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread that logs."""
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def report(self) -> None:
        """Log each wait that has lasted for long since it was last logged."""
        now, since = time.monotonic(), dict(self.since)
        self._due = {wait: due for wait, due in self._due.items() if wait in since}
        for wait, (start, thread) in since.items():
            seconds = now - start
            if seconds < self._due.get(wait, self._seconds):
                continue
            self._due[wait] = 2 * seconds
            step, ranks, _ = wait()
            site = call_site(sys._current_frames().get(thread))
            logger.warning(
                "%s, for %.0f s by now, %s; a rank that compiles, loads or writes is late, too",
                Waiting(step, ranks), seconds, site,
            )  # fmt: skip

    def forget(self) -> None:
        """Forget all, in a forked child: the waits and their thread belong to the parent."""
        self.since.clear()
        self.thread = None

    def _look(self) -> None:
        while True:
            time.sleep(min(1.0, self._seconds / 10))
            self.report()


waits: Waits = Waits()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=waits.forget)


class Exchange:
    """Messages in flight. Tensors that are sent stay alive until `wait`.

    `check`, if any, gets the received tensors with their ranks, and the `Waiting` of this exchange.
    """

    def __init__(
        self,
        ring: "Ring",
        sends: Messages,
        receives: Messages,
        works: list[dist.Work],
        check: Callable[[Messages, object], None] | None = None,
    ) -> None:
        self._ring, self._step, self._works = ring, ring.steps.now, list(works)
        self._sent, self._received = [t for _, t in sends], [t for _, t in receives]
        self._peers = [ring.first + rank for rank, _ in (*sends, *receives)]
        self._one_each = len(works) == len(self._peers)  # otherwise one work covers all messages
        came = [(ring.first + rank, t) for rank, t in receives]
        self._check: Any = came and check and partial(check, came, Waiting(self._step, self._peers))
        ring.steps.under_way.append(self)

    def wait(self) -> list[Tensor]:
        """Wait until all messages are sent and received; return the received tensors.

        Raises:
            RingError: the group's timeout has passed, or a rank is gone.
        """
        with awaiting(self._awaited):
            while self._works:
                self._works[0].wait()
                self._works.pop(0)
        if self._check:
            self._check()
        self._ring.steps.under_way.remove(self)
        self._sent = []
        return self._received

    def _awaited(self) -> tuple[Step, Sequence[int], AgreementCount]:
        """Return the step, the ranks that are waited for, and the place."""
        peers = self._peers[-len(self._works) :] if self._one_each else self._peers
        return self._step, peers, self._ring._agreement_count


class Ring:
    """Consecutive ranks of a process group, each with a place `rank` in a ring of `size`.

    A group of 8 with `size=4` is two rings, ranks 0 to 3 and 4 to 7. Groups can be made and
    destroyed between calls. One that moves no CPU tensors gets a companion that does, with the same
    lifetime. Without a group and an initialised default group the ring is this process alone; if it
    was started as one of several, that is an error. `problem` is reported in the next agreement.
    """

    problem: str | None = None
    _total: int = 1  # ranks of the group, cached: PyTorch takes 8 us to return it

    def __init__(self, group: ProcessGroup | DeviceMesh | None = None, size: int | None = None):
        if isinstance(group, DeviceMesh):
            group = group_of(group)
        if in_one_process:
            group = None
        elif group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        place, total = (
            (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        )
        if place < 0:
            raise ValueError(
                "this process is no member of the group that it gave; call this on members only"
            )
        if group is None:
            _check_missing_group()
        elif inherited or group not in _steps:  # already known otherwise
            known(group)
        if total == 1 and (size is None or size >= 1):
            size = None  # alone, a ring of any size is this process
        self.group = group
        self.size: int = total if size is None else size
        if self.size < 1 or total % self.size != 0:
            # reported in the next agreement; raising here would leave the other ranks waiting
            self.problem = f"ring_size must divide the group's {total} ranks, got {size}"
            self.size = total
        self.rank: int = place % self.size
        self.first: int = place - place % self.size
        self._total = total

    @cached_property
    def steps(self) -> Steps:
        """The steps of these ranks, shared by all `Ring` objects of them."""
        if self.group is None:
            return Steps()
        met, each = _steps.setdefault(self.group, ([0], {}))
        if (found := each.get((self.first, self.size))) is None:
            found = each[self.first, self.size] = Steps(met, ref(self.group))
        return found

    @classmethod
    def alone(cls) -> "Ring":
        """Return a ring of this process only, in whatever groups it is."""
        ring = cls.__new__(cls)
        ring.group, ring.size, ring.rank, ring.first = None, 1, 0, 0
        return ring

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ring":
        """Return this very object: process groups can't be copied."""
        return self

    def __copy__(self) -> "Ring":
        return self

    def __reduce__(self) -> NoReturn:
        """Raise TypeError, as a process group does; the text names the alternative."""
        raise TypeError(
            "a plan or cache of ring attention can't be pickled, since it has this process's "
            "group: make it anew in the other process; a RingCache's tokens travel by state_dict() "
            "and load_state_dict()"
        )

    @property
    def several(self) -> bool:
        """True if the group has other rings."""
        return self.group is not None and self.size < self._total

    @property
    def ranks(self) -> list[int]:
        """The ring's ranks in the default group, in order of their places."""
        if self.group is None:
            return [0]
        return dist.get_process_group_ranks(self.group)[self.first : self.first + self.size]

    @property
    def machines(self) -> tuple[int, ...]:
        """The number of each rank's machine; the ring's first rank is on machine 0.

        It is known from the group's first agreement on. Before, all ranks of the group must ask
        together.
        """
        if self.group is None:
            return (0,) * self.size
        if self.group not in machines_of:
            self.gather_notes("machines", b"")
        return numbered(machines_of[self.group][self.first : self.first + self.size])

    @property
    def exists(self) -> bool:
        """True unless the group has been destroyed."""
        if self.group is None:
            return True
        try:
            dist.get_process_group_ranks(self.group)
        except (KeyError, ValueError, RuntimeError):
            return False
        return True

    def exchange(self, sends: Messages, receives: Messages) -> Exchange:
        """Send each tensor to its rank, and receive from each rank into its buffer.

        Between two ranks messages match in the order given. Tensors must be contiguous. Messages
        of another call, or of another size, never match where the backend compares tags. If it
        does not, each gets a stamp, which the device compares.

        Raises:
            ValueError: tensors are on a GPU, and the group's backend for these is gloo.
            RingError: the group can't be used any more, or an earlier call has failed.
        """
        on_gpu = any(t.is_cuda for _, t in (*sends, *receives))
        if on_gpu and self._gloo_for_gpus:
            raise ValueError(
                "gloo can't send tensors of GPUs: make the group with backend "
                '"cpu:gloo,cuda:nccl", or "nccl"'
            )
        tag, stamps = self.steps.tag(), None
        if on_gpu and self._matches_by_order:
            stamps = self._stamps([*sends, *receives][0][1].device)
        ways = [(dist.isend, sends), (dist.irecv, receives)]
        check = None
        if stamps is not None:
            here = [stamps.empty() for _ in receives]
            ways.append((dist.isend, [(rank, stamps.of(tag)) for rank, _ in sends]))
            ways.append((dist.irecv, [(rank, t) for (rank, _), t in zip(receives, here)]))
            check = partial(stamps.compare, here, tag)
        group, first = self.group, self.first
        ops = [
            dist.P2POp(way, t, None, group, tag ^ t.nbytes & _TAGS, group_peer=first + rank)
            for way, messages in ways
            for rank, t in messages
        ]
        try:
            works = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            peers = [self.first + rank for rank, _ in (*sends, *receives)]
            raise RingError.waiting(self.steps.now, peers, error, self._agreement_count) from error
        return Exchange(self, sends, receives, works, check)

    def _stamps(self, device: torch.device) -> Stamps:
        """Return the guard that stamps messages of a device, where the backend compares no tags."""
        for guard in self.steps.guards:
            if isinstance(guard, Stamps) and guard.device == device:
                return guard
        stamps = Stamps(device, timeout_of(self.group).total_seconds())
        self.steps.watch(stamps)
        return stamps

    @cached_property
    def _gloo_for_gpus(self) -> bool:
        return "cuda:gloo" in str(dist.get_backend_config(self.group))

    @cached_property
    def _matches_by_order(self) -> bool:
        """True if messages of GPUs match by order alone, and kernels can check them."""
        return "cuda:nccl" in str(dist.get_backend_config(self.group)) and has_triton()

    def total(self, t: Tensor) -> None:
        """Sum a tensor over the whole group, in place; `Caller.total` compares the calls, too."""
        with awaiting(lambda: (self.steps.now, self.peers, self._agreement_count)):
            dist.all_reduce(t, group=self.group)

    def report_failure(self, error: ValueError) -> None:
        """Write a report for ranks that will wait for this one in vain: it alone raises `error`."""
        self.steps.report_failure(f"raised ValueError: {error}")

    @property
    def _agreement_count(self) -> AgreementCount:
        return self.group, self.steps.notes

    @property
    def peers(self) -> list[int]:
        """All other ranks of the group."""
        return [rank for rank in range(self._total) if rank != self.first + self.rank]

    def call(
        self, operation: str, plan: int, back_of: int | None
    ) -> AbstractContextManager[object]:
        """Return a block for this operation of all ranks of the ring; a ring of one does nothing.

        Its messages match only messages of the same operation, plan and call.

        Args:
            operation: its name in errors, with its direction and layer.
            plan: the number that all ranks have for its plan; 0 without one.
            back_of: for a derivative, the number (`Steps.number`) of the call that it is of, so
                that two backwards of equal calls differ; None for a forward.

        Raises:
            RingError: an earlier call has failed on this rank.
        """
        if self.size == 1:
            return _NO_CONTEXT
        if inherited and self.group is not None:
            known(self.group)
        return self.steps.begin(operation, plan, back_of)

    def gather_notes(self, subject: str, note: bytes, why: str | None = None) -> list[bytes]:
        """Return the note of every rank of the group, exchanged over the host: no GPU waits.

        `why` is an error of this rank, for ranks with another subject, which don't read its note.

        Raises:
            ValueError: ranks have different subjects; the same text on all ranks.
            RingError: a device has found ranks out of step, not yet reported; on all ranks.
        """
        message = self.steps.compare(subject).encode() + b"\0" + note
        about = f"{subject}\n{call_site()}" + (f"\n({why})" if why else "")
        notes = exchange(self.gather_bytes, about, message)
        troubles, ends, found = zip(*(each.partition(b"\0") for each in notes))
        if not all(ends):
            raise unreadable(subject, ends.index(b""), "it does not say how its devices are")
        if any(troubles):
            self.steps.clear_failure(partial(self.gather_bytes, b"", 1))
            for rank, told in enumerate(troubles):
                if told not in (b"", BROKEN.encode()):
                    raise RingError(
                        f"rank {rank}: {told.decode(errors='replace')}; the ring is whole again"
                    )
        return list(found)

    def gather_bytes(self, message: bytes, size: int) -> list[bytes]:
        """Return the message of every rank of the group, padded to that size with zeros.

        Raises:
            RingError: a rank did not send its message, or an earlier wait in this group has failed.
        """
        if self.group is None:
            return [message]
        if closed and self.group in closed:
            close_links(self.group)  # ranks that wait for this one see it at once
            now = self.steps.now
            raise RingError(f"{now}: a wait has failed before on this rank; {NEW_GROUP}", now)
        before = self.group, self.steps.notes - 1  # reports of ranks that are not in this agreement
        with awaiting(lambda: (self.steps.now, missing(self.group) or self.peers, before)):
            if self.group not in links_of:
                link(self.group)
            links = links_of[self.group]
            if links is None or size > FIRST:
                return gather_over_gloo(self.group, message, size)
            return links.gather(message, size)

    def shared(self) -> tuple[ProcessGroup, tuple[int, ...]] | None:
        """Return a group whose ranks act in unison, and this ring's ranks in it; or None."""
        if self.group is None or self.several:
            return None
        return self.group, tuple(range(self.size))


class SubRing(Ring):
    """A ring of some places of a whole ring, which carries its messages."""

    def __init__(self, whole: Ring, places: Sequence[int]):
        self.whole: Ring = whole
        self.places: tuple[int, ...] = tuple(places)
        self.group: ProcessGroup | None = None
        self.size: int = len(self.places)
        self.rank: int = self.places.index(whole.rank)
        self.first: int = 0

    @cached_property
    def steps(self) -> Steps:
        return self.whole.steps

    @property
    def machines(self) -> tuple[int, ...]:
        of_whole = self.whole.machines
        return numbered([of_whole[place] for place in self.places])

    def exchange(self, sends: Messages, receives: Messages) -> Exchange:
        sends, receives = ([(self.places[r], t) for r, t in ops] for ops in (sends, receives))
        return self.whole.exchange(sends, receives)

    def shared(self) -> tuple[ProcessGroup, tuple[int, ...]] | None:
        found = self.whole.shared()
        return None if found is None else (found[0], tuple(found[1][p] for p in self.places))

    def gather_bytes(self, message: bytes, size: int) -> list[bytes]:
        raise NotImplementedError("the whole ring agrees, not a part of it")


class Caller(NamedTuple):
    """The function that makes calls on a ring; their messages say which.

    Attributes:
        ring: the ranks.
        name: the function's, in errors.
        plan: the number that all ranks have for its plan; 0 without one.
        back_of: as for `Ring.call`.
    """

    ring: Ring
    name: str
    plan: int
    back_of: int | None = None

    def call(self) -> AbstractContextManager[object]:
        """Return the block of a call, as `Ring.call`."""
        name = self.name if self.back_of is None else f"{self.name}, backward"
        return self.ring.call(name, self.plan, self.back_of)

    def back(self) -> "Caller":
        """Return the caller of the backward of the last call."""
        return self._replace(back_of=self.ring.steps.number)

    @property
    def of_group(self) -> "Caller":
        """This caller with all ranks of the group, whose calls are not counted by its rings."""
        return self._replace(ring=Ring(self.ring.group)) if self.ring.several else self

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of x, floating, over the whole group.

        All-reduces match by their order alone. So the number of the call is summed, too, and its
        square: unless all are equal these are no multiples of this rank's. Then a CPU raises, and
        on GPUs the sums are NaN.

        Raises:
            RingError: a rank is in another call.
        """
        caller = self.of_group
        ring, steps = caller.ring, caller.ring.steps
        with caller.call():
            number = steps.tag() % _SUMMED
            mine = x.new_full((2,), number, dtype=torch.float64)
            mine[1] *= number
            total = torch.cat((x.flatten().double(), mine))
            ring.total(total)
            alike = (total[-2:] == mine * ring.size).all()
            if x.device.type == "cpu" and not alike:
                raise RingError(f"{steps.now}: a rank is in another call", steps.now)
            return total[:-2].view_as(x).to(x.dtype).masked_fill(~alike, torch.nan)


Group = ProcessGroup | DeviceMesh | Ring | None


def as_ring(group: Group, size: int | None = None) -> Ring:
    """Return the ring of a group's ranks, or of `size` consecutive ones."""
    if not isinstance(group, Ring):
        return Ring(group, size)
    if in_one_process:
        return Ring.alone()
    if size not in (None, group.size):
        raise ValueError(f"ring_size={size} was given beside a ring of {group.size}")
    return group


def _check_missing_group() -> None:
    """Raise ValueError if this process was started as one of several, but has no group."""
    if in_one_process or not dist.is_available():
        return
    elastic = dist.is_torchelastic_launched() and os.environ["WORLD_SIZE"] != "1"
    main = getattr(multiprocessing.current_process(), "_target", None)
    spawned = getattr(main, "__module__", None) == "torch.multiprocessing.spawn"
    if elastic or spawned:
        raise ValueError(
            f"{'torchrun' if elastic else 'torch.multiprocessing'} started this process as one of "
            "several, but there is no process group, so each would work alone: call "
            "torch.distributed.init_process_group() first"
        )
