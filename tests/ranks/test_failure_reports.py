"""Reports of failures, and of exchanges that do not come."""

import json
import logging
import time
from functools import partial
from unittest import mock

import pytest
import torch.distributed as dist

from ring_attention_pytorch.ranks import failure_reports
from ring_attention_pytorch.ranks.failure_reports import Overdue
from tests.support.ranks import unhurried


def test_words_of_a_failure_are_those_since_notes_were_last_compared():
    store = dist.HashStore()
    store.set("rank 1", json.dumps([3, "raised MemoryError", []]))
    look, words = partial(failure_reports._look, None), {}
    with (
        mock.patch.object(failure_reports, "_store", return_value=store),
        mock.patch.object(failure_reports, "_key", lambda _, rank: f"rank {rank}"),
        mock.patch.object(failure_reports, "_MEANWHILE", 0.1),
    ):
        look(4, {0: [1]}, words)
        assert words == {}
        look(3, {0: [1]}, words)
        assert words == {1: "raised MemoryError"}


def test_waits_are_followed_to_the_ranks_that_are_missing():
    """Rank 0 waits for 1, which waits for 2, which waits for 0 and for 3, of which nobody hears."""
    store = dist.HashStore()
    for rank, waits_for in ((1, [2]), (2, [0, 3]), (4, [5])):
        store.set(f"rank {rank}", json.dumps([0, f"waits for {waits_for}", waits_for]))
    with (
        mock.patch.object(failure_reports, "_store", return_value=store),
        mock.patch.object(failure_reports, "_key", lambda _, rank: f"rank {rank}"),
        mock.patch.object(failure_reports, "_MEANWHILE", 0.1),
        mock.patch.object(failure_reports, "ProcessGroup", object),
        mock.patch.object(dist, "get_rank", return_value=0),
    ):
        found = failure_reports.read("a group", 0, [1])
        assert found.lines == {1: "waits for [2]", 2: "waits for [0, 3]"}
        assert (found.silent, found.awaited, found.store) == ([3], True, True)
        store.set("rank 3", "no JSON")
        assert not failure_reports.read("a group", 0, [1]).store


def waits(numbers: int, come: int, caplog: pytest.LogCaptureFixture) -> None:
    """Let so many exchanges begin, of which that many come; wait for what is logged."""
    arrived, seconds = 0, unhurried(0.5)
    overdue = Overdue(lambda: arrived, timeout=seconds)
    for number in range(1, numbers + 1):
        overdue.add(number, f"exchange {number}")
    arrived = come
    end = time.monotonic() + (2 * seconds if come == numbers else 100.0)
    while not caplog.records and time.monotonic() < end:
        time.sleep(0.05)


def test_the_first_exchange_that_does_not_come_is_reported(caplog):
    waits(3, 3, caplog)
    assert caplog.record_tuples == []
    waits(3, 1, caplog)
    ((_, level, text),) = caplog.record_tuples
    assert level == logging.ERROR
    assert text.startswith("exchange 2, for ")


def test_who_watches_exchanges_ends_with_them():
    overdue = Overdue(lambda: 0, timeout=100.0)
    overdue.add(1, "an exchange")
    thread = overdue._thread
    del overdue
    thread.join(100.0)
    assert not thread.is_alive()
