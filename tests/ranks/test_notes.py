"""Notes over links of a host: who is told what, who is named, and when there are none."""

import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ring_attention_pytorch import fail_together
from ring_attention_pytorch.ranks import failures, notes
from ring_attention_pytorch.ranks.failures import Missing, RingError, Step
from ring_attention_pytorch.ranks.notes import FIRST, Links, _rendezvous
from ring_attention_pytorch.ranks.ring import Ring, Steps, awaiting
from tests.support.links import ring_of_links

SIZE = 3


def together(do: Callable[[int], Any], ranks: Sequence[int] = range(SIZE)) -> list[Any]:
    """Return each rank's result, in a thread, or what it raises."""

    def caught(rank: int) -> Any:
        try:
            return do(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(SIZE) as threads:
        return [*threads.map(caught, ranks)]


def test_every_rank_gets_every_message_filled_up_in_order_again_and_again():
    links = ring_of_links()
    for number in range(3):
        told = together(lambda rank: links[rank].gather(b"%d%d" % (number, rank), 4))  # noqa: B023
        assert told == [[b"%d%d\0\0" % (number, rank) for rank in range(SIZE)]] * SIZE


def test_who_does_not_come_in_time_is_named_and_finds_all_closed():
    links = ring_of_links(patience=0.2)
    first, second = together(lambda rank: links[rank].gather(b"", 1), ranks=(0, 2))
    assert {str(first), str(second)} >= {"Timed out waiting 200ms"}
    for error in (first, second):
        assert isinstance(error, Missing)
        assert set(error.ranks) <= {0, 1, 2}
        assert 1 in error.ranks or "closed" in str(error)
    for _ in range(2):
        with pytest.raises(Missing, match="Connection closed"):
            links[1].gather(b"", 1)


def test_an_end_is_noticed_while_another_rank_is_waited_for():
    links = ring_of_links(patience=300.0)
    threading.Timer(0.05, links[2].close).start()
    with pytest.raises(Missing, match="Connection closed") as told:
        links[0].gather(b"", 1)  # rank 1 does not come either
    assert told.value.ranks == (2,)


def test_what_an_interrupted_exchange_has_left_is_not_taken_for_the_next_one():
    links = ring_of_links()
    with (
        mock.patch.object(notes, "_wait", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        links[0].gather(b"old", 3)
    together(lambda rank: links[rank].gather(b"old", 3), ranks=(1, 2))
    assert together(lambda rank: links[rank].gather(b"new", 3)) == [[b"new"] * SIZE] * SIZE


def test_patience_is_with_the_exchange_and_not_with_each_message():
    links, left = ring_of_links(patience=0.6), []

    class Poll:
        """In which rank 1 sends after some time, and rank 2 never does."""

        def register(self, *_: object) -> None:
            pass

        def poll(self, milliseconds: float) -> list[int]:
            left.append(milliseconds)
            if len(left) == 1:
                time.sleep(0.4)
                links[1]._links[0].send(notes._NUMBER.pack(1))
            return [1] * (len(left) == 1)

    with (
        mock.patch.object(notes, "select", SimpleNamespace(poll=Poll, POLLIN=1)),
        pytest.raises(Missing, match="Timed out waiting 600ms") as told,
    ):
        links[0].gather(b"", 1)
    assert told.value.ranks == (2,)
    assert left[0] <= 600
    assert left[1] <= left[0] - 400  # and not anew for each message


def test_who_comes_late_but_in_time_is_waited_for():
    links = ring_of_links(patience=100.0)
    told = together(lambda rank: time.sleep(0.3 * rank) or links[rank].gather(b"x", 1))
    assert told == [[b"x"] * SIZE] * SIZE


@pytest.mark.parametrize("packet", [b"?", b"x" * (FIRST + 9)], ids=["without number", "too long"])
def test_a_packet_that_is_no_note_names_who_has_sent_it(packet):
    links = ring_of_links()
    links[1]._links[0].send(packet)
    with pytest.raises(Missing, match=f"rank 1 sent a packet of {len(packet)} bytes") as told:
        links[0].gather(b"", 1)
    assert told.value.ranks == (1,)


# --- the decision ---


class Host:
    """A gather of threads, in place of gloo."""

    def __init__(self) -> None:
        self.barrier, self.told = threading.Barrier(SIZE, timeout=60), [b""] * SIZE

    def gather(self, rank: int, message: bytes, size: int) -> list[bytes]:
        self.told[rank] = message.ljust(size, b"\0")
        self.barrier.wait()
        told = [*self.told]
        self.barrier.wait()
        return told

    def meet(self, rank: int) -> Links | None:
        gather = lambda message, size: self.gather(rank, message, size)  # noqa: E731
        return _rendezvous(rank, SIZE, gather, timedelta(seconds=10)).links


def test_ranks_of_one_host_meet_and_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    links = together(Host().meet)
    told = together(lambda rank: links[rank].gather(b"%d" % rank, 1))
    assert told == [[b"0", b"1", b"2"]] * SIZE
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_temporary_files_may_have_a_long_name(tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    links = together(Host().meet)
    assert together(lambda rank: links[rank].gather(b"%d" % rank, 1)) == [[b"0", b"1", b"2"]] * SIZE


@pytest.mark.parametrize("why", ["no door", "another host", "no folder"])
def test_if_one_rank_has_no_way_none_has(why):
    host, doors, reached, here = (
        Host(),
        notes._listening_socket,
        notes._connected,
        threading.local(),
    )

    def meet(rank: int) -> Links | None:
        here.rank = rank
        return host.meet(rank)

    patch: tuple[Any, str, Any] = (tempfile, "tempdir", "/no/such/folder")
    if why == "no door":
        closed = lambda: nullcontext(None)  # noqa: E731
        patch = notes, "_listening_socket", lambda n: closed() if here.rank == 1 else doors(n)
    elif why == "another host":
        far = lambda rank, paths: reached(rank, [path + b"?" * rank for path in paths])  # noqa: E731
        patch = notes, "_connected", far
    with mock.patch.object(*patch):
        assert together(meet) == [None] * SIZE


def test_ranks_of_several_machines_have_no_links_though_they_could():
    """And all know who shares a machine."""
    host, here = Host(), threading.local()

    def meet(rank: int) -> notes.Reached:
        here.rank = rank
        gather = lambda message, size: host.gather(rank, message, size)  # noqa: E731
        return _rendezvous(rank, SIZE, gather, timedelta(seconds=10))

    with mock.patch.object(notes, "machine_name", side_effect=lambda: "bab"[here.rank]):
        assert together(meet) == [notes.Reached(None, (0, 1, 0))] * SIZE


def connected(door: socket.socket, said: bytes) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(door.getsockname())
    if said:
        link.send(said)
    return link


def test_only_ranks_that_are_awaited_are_let_in():
    come, named = [], notes._RANK.pack
    visitors = b"", b"?", named(2), named(7), named(0), b"much" * 9, named(1)
    with notes._listening_socket(SIZE) as door, mock.patch.object(notes, "_HEARD", 0.05):
        visit = threading.Thread(
            target=lambda: come.extend(connected(door, said) for said in visitors), daemon=True
        )
        visit.start()
        links = notes._accept(door, range(1, SIZE))
        visit.join()
        links[2].send(b"welcome")
        assert sorted(links) == [1, 2]
        assert come[2].recv(9) == b"welcome"
    for link in [*come, *links.values()]:
        link.close()


def connect_and_let_in(door: socket.socket) -> None:
    with connected(door, notes._RANK.pack(1)):
        notes._accept(door, range(1, SIZE))


def test_who_does_not_come_to_the_door_is_named_in_time():
    with (
        mock.patch.object(notes, "_PATIENCE", 0.2),
        notes._listening_socket(SIZE) as door,
        pytest.raises(Missing, match=r"nobody has come in 0.2 s") as told,
    ):
        connect_and_let_in(door)
    assert told.value.ranks == (2,)


def test_a_group_of_one_tells_itself():
    links, machines = _rendezvous(
        0, 1, lambda message, size: [message.ljust(size, b"\0")], timedelta(days=100)
    )
    assert machines == (0,)
    assert links is not None
    assert links.gather(b"x", 2) == [b"x\0"]


def test_a_large_group_has_none():
    with mock.patch.object(notes, "_MOST", SIZE - 1):
        assert together(Host().meet) == [None] * SIZE


# --- in processes ---


def without_gloo() -> tuple[list[bytes], int, int]:
    """For a pool: a note, and how many messages went over gloo: of it, and of a long one."""
    ring, gather, sent = Ring(), dist.all_gather, []

    def counted(*given: Any, **named: Any) -> Any:
        sent.append(1)
        return gather(*given, **named)

    ring.gather_notes("first", b"")
    with mock.patch.object(dist, "all_gather", counted):
        told = ring.gather_notes("a note", b"%d" % ring.rank)
        short = len(sent)
        assert ring.gather_notes("long", b"x" * 2 * FIRST) == [b"x" * 2 * FIRST] * ring.size
    return told, short, len(sent)


def test_notes_take_no_gloo_but_the_rest_of_long_ones(pools):
    assert pools(2).run(without_gloo) == [([b"0", b"1"], 0, 1)] * 2


def patience() -> float:
    """For a pool: how long this rank waits for notes of a group whose timeout is 7 seconds."""
    group = dist.new_group(timeout=timedelta(seconds=7))
    Ring(group).gather_notes("first", b"")
    return notes.links_of[group]._patience


def test_notes_are_waited_for_as_long_as_the_group_s_timeout(pools):
    assert pools(2).run(patience) == [7.0] * 2


def test_the_error_names_who_is_missing_and_nobody_else():
    step = Step("comparing notes", 0, 0, 0)
    with pytest.raises(RingError) as told, awaiting(lambda: (step, [0, 1, 3], (None, 0))):
        raise Missing("Timed out waiting 200ms", [1])
    assert told.value.ranks == (1,)
    assert "waited for rank 1, in vain for 0.2 s" in str(told.value)
    with pytest.raises(RingError) as told, awaiting(lambda: (step, [0, 1, 3], (None, 0))):
        raise Missing("Connection closed", ())
    assert told.value.ranks == (0, 1, 3)
    assert "the connection was closed" in str(told.value)


def test_a_failure_closes_links_in_fail_together_only():
    links = ring_of_links()
    with mock.patch.object(failures, "links", links[:1]):
        with pytest.raises(ArithmeticError), Steps().begin("forward", 0, None):
            raise ArithmeticError
        assert len(links[0]._links) == SIZE - 1
        with pytest.raises(ArithmeticError), fail_together():
            raise ArithmeticError
    with pytest.raises(Missing, match="Connection closed"):
        links[1].gather(b"", 1)


def test_a_forked_child_keeps_no_link_open():
    links = ring_of_links()
    with mock.patch.object(failures, "links", links[:1]):
        child = os.fork()
        if child == 0:
            os._exit(len(links[0]._links))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(links[0]._links) == SIZE - 1
