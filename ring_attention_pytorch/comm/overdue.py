"""A report of messages that do not come: NCCL ends a process without saying what it waited for."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from weakref import ref

logger = logging.getLogger("ring_attention_pytorch")

_SOONER = 0.8  # of the timeout, when the report is made


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
