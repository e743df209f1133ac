"""Exchanges that do not come are reported, and nothing watches them afterwards."""

import logging
import time

from ring_attention_pytorch.ranks.failure_reports import Overdue


def waits(numbers: int, come: int) -> None:
    """Let so many exchanges begin, of which that many come."""
    arrived = 0
    overdue = Overdue(lambda: arrived, timeout=0.5)
    for number in range(1, numbers + 1):
        overdue.add(number, f"exchange {number}")
    arrived = come
    time.sleep(1.0)


def test_the_first_exchange_that_does_not_come_is_reported(caplog):
    waits(3, come=3)
    assert caplog.record_tuples == []
    waits(3, come=1)
    logged = [("ring_attention_pytorch", logging.ERROR, "exchange 2, for 0 s by now")]
    assert caplog.record_tuples == logged


def test_who_watches_exchanges_ends_with_them():
    overdue = Overdue(lambda: 0, timeout=100.0)
    overdue.add(1, "an exchange")
    thread = overdue._thread
    del overdue
    thread.join(10.0)
    assert not thread.is_alive()
