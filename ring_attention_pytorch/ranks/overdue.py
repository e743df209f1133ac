"""Reports of what does not come, while it is waited for.

NCCL ends a process without saying what it waited for. And a rank that compiles, loads or writes
while others wait for it looks like one that hangs.
"""

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from weakref import ref

from ring_attention_pytorch.ranks.notes import call_site

logger = logging.getLogger("ring_attention_pytorch")

_SOONER = 0.8  # of the timeout, when the report is made
_LONG = 15.0  # seconds after which a wait of the host is reported, and again whenever it doubles


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


class Waits:
    """Waits of this process's threads for other ranks, each reported while it lasts.

    To begin and end one takes about a microsecond. A thread of its own looks at those that
    last. What waits says in words what it waits for, when it is asked.
    """

    def __init__(self, seconds: float = _LONG) -> None:
        self._seconds = seconds
        self._since: dict[object, tuple[float, int]] = {}  # and its thread, by what waits
        self._due: dict[object, float] = {}  # seconds until the next report of each that lasts
        self._thread: threading.Thread | None = None

    def begin(self, wait: object) -> None:
        """Report `wait`, as long as it does not end."""
        self._since[wait] = time.monotonic(), threading.get_ident()
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()

    def end(self, wait: object) -> None:
        """Report this one no more."""
        self._since.pop(wait, None)

    def report(self) -> None:
        """Log each wait that has lasted for long since it was last told."""
        now, since = time.monotonic(), dict(self._since)
        self._due = {wait: due for wait, due in self._due.items() if wait in since}
        for wait, (start, thread) in since.items():
            seconds = now - start
            if seconds < self._due.get(wait, self._seconds):
                continue
            self._due[wait] = 2 * seconds
            site = call_site(sys._current_frames().get(thread))
            logger.warning(
                "%s, for %.0f s by now, %s; a rank that compiles, loads or writes is late, too",
                wait, seconds, site,
            )  # fmt: skip

    def forget(self) -> None:
        """Forget all, in a forked child: neither those waits nor their thread are its own."""
        self._since.clear()
        self._thread = None

    def _look(self) -> None:
        while True:
            time.sleep(min(1.0, self._seconds / 10))
            self.report()


waits = Waits()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=waits.forget)
