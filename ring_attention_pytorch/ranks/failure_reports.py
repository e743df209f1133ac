"""Reports of failures: each failing rank's line for the others, and a log of overdue exchanges.

A rank that times out knows only its own call. Each rank that fails, or waits in vain, therefore
writes one line to its group's store, and errors quote those lines. NCCL ends a process without
naming the exchange that timed out: overdue exchanges of a device are logged before that.
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
_MEANWHILE = 0.4  # seconds in which other waiting ranks write theirs
_PATIENCE = 1.0  # seconds for all of it: the store is gone if its rank is
_SOONER = 0.8  # fraction of the timeout after which an overdue exchange is logged


def write(group: ProcessGroup | None, notes: int, words: str) -> None:
    """Write this rank's line: it failed after the group's agreement number `notes`."""
    if not isinstance(group, ProcessGroup):
        return
    told = json.dumps([notes, " ".join(words.split())[:_LONGEST]])
    _in_time(lambda: _store().set(_key(group, dist.get_rank(group)), told))


def read(group: ProcessGroup | None, notes: int, ranks: Sequence[int]) -> dict[int, str]:
    """Return the lines that ranks of a group have written since agreement `notes`, by rank."""
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
                if since >= notes:  # earlier ones are of a failure that was cleared
                    words[rank] = text
        time.sleep(0.02)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _key(group: ProcessGroup, rank: int) -> str:
    return f"ring_attention_pytorch/last words/{group.group_name}/{rank}"


def _in_time(work: Callable[[], object]) -> None:
    """Run `work` in a thread, and stop waiting for it after a second."""

    def quietly() -> None:
        with suppress(Exception):
            work()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(_PATIENCE)


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
