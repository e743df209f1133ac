"""Reports of failures: the line that a rank leaves for the others, and what a device waits for.

A rank that times out knows only its own call. So each rank that fails, or waits in vain, writes one
line to its group's store, and errors quote those lines. And NCCL ends a process without saying what
it waited for: exchanges of a device that are overdue are logged before that.
"""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from weakref import ref

import torch.distributed as dist
from torch.distributed import ProcessGroup

logger = logging.getLogger("ring_attention_pytorch")

_LONGEST = 300  # characters
_MEANWHILE = 0.4  # seconds in which others that wait, too, write theirs
_PATIENCE = 1.0  # seconds for all of it: the store may be gone with the rank that has it
_SOONER = 0.8  # of the timeout, when an overdue exchange is logged


def write(group: ProcessGroup | None, notes: int, words: str) -> None:
    """Write the line of this rank, which has failed after the group compared so many notes."""
    if not isinstance(group, ProcessGroup):
        return
    told = json.dumps([notes, " ".join(words.split())[:_LONGEST]])
    _in_time(lambda: _store().set(_key(group, dist.get_rank(group)), told))


def read(group: ProcessGroup | None, notes: int, ranks: Sequence[int]) -> dict[int, str]:
    """Return the lines of those of a group's ranks that have written one since, by rank."""
    words: dict[int, str] = {}
    if isinstance(group, ProcessGroup):
        _in_time(lambda: _look(group, notes, ranks, words))
    return words


def _look(group: ProcessGroup, notes: int, ranks: Sequence[int], words: dict[int, str]) -> None:
    store, end = _store(), time.monotonic() + _MEANWHILE
    while len(words) < len(ranks) and time.monotonic() < end:
        for rank in ranks:
            if rank not in words and store.check([_key(group, rank)]):
                since, text = json.loads(store.get(_key(group, rank)))
                if since >= notes:  # else they are of a failure that was mended
                    words[rank] = text
        time.sleep(0.02)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _key(group: ProcessGroup, rank: int) -> str:
    return f"ring_attention_pytorch/last words/{group.group_name}/{rank}"


def _in_time(work: Callable[[], object]) -> None:
    """Work in a thread, for no longer than a second: what is not known then is not known."""

    def quietly() -> None:
        with suppress(Exception):
            work()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(_PATIENCE)


class Overdue:
    """The exchanges of a device that may not have come, watched by a thread of their own.

    `come` counts those that have; it asks no GPU.
    """

    def __init__(self, come: Callable[[], float], timeout: float) -> None:
        self._come, self._seconds = come, _SOONER * timeout
        self._waiting: deque[tuple[int, float, object]] = deque()
        self._thread: threading.Thread | None = None

    def add(self, number: int, what: object) -> None:
        """Report `what`, an exchange of this number, if it has not come when time is nearly up."""
        self._drop_those_that_came()
        self._waiting.append((number, time.monotonic() + self._seconds, what))
        if self._thread is None:
            # ends with this object, which it does not keep
            self._thread = threading.Thread(target=_watch, args=(ref(self),), daemon=True)
            self._thread.start()

    def report(self) -> bool:
        """Log the first exchange whose time is nearly up; tell whether there is one."""
        self._drop_those_that_came()
        if not self._waiting or time.monotonic() <= self._waiting[0][1]:
            return False
        what = self._waiting[0][2]
        logger.error("%s, for %.0f s by now", what, self._seconds)
        return True

    @property
    def period(self) -> float:
        """Seconds from one look to the next."""
        return min(1.0, self._seconds / 20)

    def _drop_those_that_came(self) -> None:
        come = self._come()
        while self._waiting and self._waiting[0][0] <= come:
            self._waiting.popleft()


def _watch(overdue: "ref[Overdue]") -> None:
    """Report once: what waits for a late exchange can't come either."""
    while (watched := overdue()) is not None and not watched.report():
        period = watched.period
        del watched
        time.sleep(period)
