"""Reports of failures: each failing rank's line for the others, and a log of overdue exchanges.

A rank that times out knows only its own call. Each rank that fails, or waits in vain, therefore
writes one line to its group's store, and errors quote those lines. A line also says for whom the
rank waits, so that an error follows these waits to the ranks that are missing. NCCL ends a process
without naming the exchange that timed out: overdue exchanges of a device are logged before that.
"""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple
from weakref import ref

import torch.distributed as dist
from torch.distributed import ProcessGroup

logger = logging.getLogger("ring_attention_pytorch")

_LONGEST = 300  # characters
_MEANWHILE = 0.4  # seconds in which other waiting ranks write theirs
_PATIENCE = 1.0  # seconds for all of it: the store is gone if its rank is
_SOONER = 0.8  # fraction of the timeout after which an overdue exchange is logged


class Words(NamedTuple):
    """The lines of ranks that a rank waits for, and of the ranks that these wait for, and so on."""

    lines: dict[int, str]
    silent: list[int]  # ranks without a line
    awaited: bool  # a rank with a line waits for this one
    store: bool  # the group's store has answered


def write(
    group: ProcessGroup | None, notes: int, words: str, waits_for: Sequence[int] = ()
) -> None:
    """Write this rank's line: it failed after the group's agreement number `notes`."""
    if not isinstance(group, ProcessGroup):
        return
    told = json.dumps([notes, " ".join(words.split())[:_LONGEST], [*waits_for]])
    _in_time(lambda: _store().set(_key(group, dist.get_rank(group)), told))


def read(group: ProcessGroup | None, notes: int, ranks: Sequence[int]) -> Words:
    """Return the lines that ranks of a group have written since agreement `notes`."""
    if not isinstance(group, ProcessGroup):
        return Words({}, [*ranks], awaited=False, store=True)
    lines: dict[int, str] = {}
    mine = dist.get_rank(group)
    waits = {mine: ranks}  # of each rank
    answered = _in_time(lambda: _look(group, notes, waits, lines))
    waits, lines = dict(waits), dict(lines)  # the thread may still look
    awaited = any(mine in each for rank, each in waits.items() if rank != mine)
    return Words(lines, sorted(_asked(waits) - {mine, *lines}), awaited, answered)


def _asked(waits: dict[int, Sequence[int]]) -> set[int]:
    """Return the ranks that others wait for.

    >>> _asked({0: [1], 1: [2, 0]})
    {0, 1, 2}
    """
    return {rank for each in waits.values() for rank in each}


def _look(
    group: ProcessGroup, notes: int, waits: dict[int, Sequence[int]], lines: dict[int, str]
) -> None:
    """Add the lines of all ranks that anybody waits for, and whom those wait for."""
    store, end, mine = _store(), time.monotonic() + _MEANWHILE, {*waits}
    while (missing := _asked(waits) - {*lines} - mine) and time.monotonic() < end:
        for rank in sorted(missing):
            if store.check([_key(group, rank)]):
                since, text, waits_for = json.loads(store.get(_key(group, rank)))
                if since >= notes:  # earlier ones are of a failure that was cleared
                    lines[rank], waits[rank] = text, waits_for
        time.sleep(0.02)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _key(group: ProcessGroup, rank: int) -> str:
    return f"ring_attention_pytorch/last words/{group.group_name}/{rank}"


def _in_time(work: Callable[[], object]) -> bool:
    """Run `work` in a thread for at most a second; return whether it was done without an error."""
    done = threading.Event()

    def quietly() -> None:
        with suppress(Exception):
            work()
            done.set()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return done.is_set()


class Overdue:
    """The exchanges of a device that may not have arrived, watched by a separate thread.

    `come` returns how many have arrived; it does not synchronize with the GPU.
    """

    def __init__(self, come: Callable[[], float], timeout: float) -> None:
        self._come, self._seconds = come, _SOONER * timeout
        self._waiting: deque[tuple[int, float, object]] = deque()
        self._thread: threading.Thread | None = None

    def add(self, number: int, what: object) -> None:
        """Log `what`, the exchange of this number, if it is late shortly before the timeout."""
        self._drop_those_that_came()
        self._waiting.append((number, time.monotonic() + self._seconds, what))
        if self._thread is None:
            # ends with this object: it has only a weak reference
            self._thread = threading.Thread(target=_watch, args=(ref(self),), daemon=True)
            self._thread.start()

    def report(self) -> bool:
        """Log the first exchange that is nearly out of time; return whether there is one."""
        self._drop_those_that_came()
        if not self._waiting or time.monotonic() <= self._waiting[0][1]:
            return False
        what = self._waiting[0][2]
        logger.error("%s, for %.0f s by now", what, self._seconds)
        return True

    @property
    def period(self) -> float:
        """Seconds between two checks."""
        return min(1.0, self._seconds / 20)

    def _drop_those_that_came(self) -> None:
        come = self._come()
        while self._waiting and self._waiting[0][0] <= come:
            self._waiting.popleft()


def _watch(overdue: "ref[Overdue]") -> None:
    """Report once: everything that waits for a late exchange is late, too."""
    while (watched := overdue()) is not None and not watched.report():
        period = watched.period
        del watched
        time.sleep(period)
