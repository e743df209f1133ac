"""How ranks exchange notes over the host.

The first message has a fixed size, so that ranks can disagree about anything else. Only if a note
is longer do all ranks exchange the rest. Ranks in different calls find out here, because gloo
matches messages by their order alone.

Ranks on one host exchange notes over sockets ("links"), in 20 us; gloo takes 200. gloo hands each
message to its own threads, which costs four changes of thread. Sockets cost none: the kernel wakes
the waiting thread when a message arrives or a process ends. All ranks of a group decide together,
once, whether it has links: all must be of one machine, and each must have reached every other one.
"""

import ctypes
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, finalize, ref

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ring_attention_pytorch.ranks.failures import (
    Disagreement,
    Missing,
    by_value,
    known,
    ranks_of,
    timeout_of,
)
from ring_attention_pytorch.ranks.failures import links as all_links
from ring_attention_pytorch.ranks.machines import machine_name, numbered

FIRST = 4096  # bytes that are always exchanged
_MARK = b"ring-attention-pytorch 3\n"
_HEAD = struct.Struct(f">{len(_MARK)}sHQ")  # mark, bytes of the subject, bytes of the note
_LONGEST_SUBJECT = 600  # bytes
_LONGEST = 1 << 28  # bytes of a note; every rank stores the notes of all

_MOST = 16  # ranks of a group with links, which connect each pair
_NUMBER = struct.Struct("<Q")
_RANK = struct.Struct("<I")
_MOST_MS = 1e9  # the longest wait that an OS accepts
_PATIENCE = 5.0  # seconds to connect to a rank or to accept one
_HEARD = 0.5  # seconds for its number, which a rank sends first
_LONGEST_FOLDER = 70  # bytes of its name: one of a socket has at most 107
_AWAKE = 50e-6  # seconds to poll before sleeping: waking takes as long

# (message, size) -> the message of every rank, padded to that size
Gather = Callable[[bytes, int], Sequence[bytes]]


def exchange(gather: Gather, subject: str, note: bytes) -> list[bytes]:
    """Exchange notes, and return every rank's. All ranks call this, with the same subject.

    Only the first lines of subjects are compared. The rest may differ, and errors quote it.

    Raises:
        Disagreement: the subjects differ, or a message is no note, or a note is too long.

    >>> exchange(lambda message, size: [message.ljust(size, b"?")] * 2, "lengths", b"13")
    [b'13', b'13']
    """
    about = subject.encode(errors="replace")[:_LONGEST_SUBJECT]
    message = _HEAD.pack(_MARK, len(about), len(note)) + about + note
    firsts = gather(message[:FIRST], FIRST)
    if firsts.count(message.ljust(FIRST, b"\0")) == len(firsts):
        return [note] * len(firsts)  # all notes are equal: nothing to parse
    subjects, spans = zip(*(_opened(first) for first in firsts))
    check_subjects(subjects)
    lengths = [span.stop - span.start for span in spans]
    if max(lengths) > _LONGEST:
        rank = lengths.index(max(lengths))
        why = f"it has {max(lengths)} bytes, more than {_LONGEST}"
        raise unreadable(subject.split("\n")[0], rank, why)
    more = max(span.stop for span in spans) - FIRST
    rests = gather(message[FIRST:], more) if more > 0 else [b""] * len(spans)
    notes = []
    for first, rest, span in zip(firsts, rests, spans):
        notes.append((first + rest)[span])
    return notes


def _opened(first: bytes) -> tuple[str | None, slice]:
    """Return a message's subject and the place of its note; None as subject if it is no note."""
    mark, about, length = _HEAD.unpack(first[: _HEAD.size])
    if mark != _MARK or about > _LONGEST_SUBJECT:
        return None, slice(0, 0)
    start = _HEAD.size + about
    return first[_HEAD.size : start].decode(errors="replace"), slice(start, start + length)


def unreadable(caller: str, rank: int, why: object) -> Disagreement:
    """Make the error of a note that can't be parsed: another version of this library sent it."""
    return Disagreement(
        f"{caller}: the note of rank {rank} can't be read: {why}; "
        "run the same version of this library on all ranks"
    )


def read_json(caller: str, rank: int, note: bytes) -> Any:
    """Parse the note of a rank, which is JSON.

    Raises:
        Disagreement: it is none.

    >>> read_json("a call", 0, b'{"n": 4}')
    {'n': 4}
    """
    try:
        return json.loads(note)
    except (ValueError, RecursionError) as error:
        raise unreadable(caller, rank, error) from None


def check_subjects(subjects: Sequence[str | None]) -> None:
    """Raise Disagreement if ranks are in different calls, or one does not call this library."""
    first_lines = [subject and subject.split("\n")[0] for subject in subjects]
    if len({*first_lines}) == 1 and first_lines[0] is not None:
        return
    calls = []
    for ranks in by_value(first_lines).values():
        calls.append(f"{ranks_of(ranks)}: {_in_one_line(subjects[ranks[0]])}")
    raise Disagreement(
        "ranks are in different calls, all of them must make the same ones in the same order; "
        f"now they are in {'; '.join(calls)}"
    )


def _in_one_line(subject: str | None) -> str:
    return "something else than this library" if subject is None else subject.replace("\n", " ")


# --- links between the ranks of a host, and gloo ---


class Links:
    """This rank's sockets to all others of its group, by rank.

    As in a gloo group they are closed, on all ranks, when a message does not arrive within
    `patience`, when a rank ends, or when it fails in a block of `fail_together`.
    """

    def __init__(self, rank: int, links: Mapping[int, socket.socket], patience: timedelta) -> None:
        self._rank, self._links, self._patience = rank, dict(links), patience.total_seconds()
        self._number, self._closed = 0, False  # the number of the exchange
        self.missing: dict[int, socket.socket] = {}  # ranks whose messages this exchange waits for
        all_links.add(self)

    def gather(self, message: bytes, size: int) -> list[bytes]:
        """Return the message of every rank, at most `FIRST` bytes, padded to `size` with zeros.

        Raises:
            Missing: a rank did not send in time, or has ended; the error names these ranks.
        """
        if self._closed:
            raise Missing("Connection closed", ())
        self._number += 1
        packet, found = _NUMBER.pack(self._number) + message, {self._rank: message}
        try:
            for rank, link in self._links.items():
                try:
                    link.send(packet, socket.MSG_NOSIGNAL)
                except OSError as error:
                    raise Missing(f"Connection closed: {error}", [rank]) from error
            self._receive(found)
        except Missing:
            self.close()
            raise
        return [found[rank].ljust(size, b"\0") for rank in sorted(found)]

    def _receive(self, found: dict[int, bytes]) -> None:
        """Add the other ranks' messages to `found`, in the order of their arrival."""
        self.missing = missing = dict(self._links)
        start = time.monotonic()
        while missing:
            for rank, link in [*missing.items()]:
                try:
                    packet = link.recv(_NUMBER.size + FIRST + 1)
                except BlockingIOError:
                    continue  # it has not arrived yet
                except OSError:  # the peer has ended with unread data
                    packet = b""
                if not packet:
                    raise Missing("Connection closed", [rank])
                if not _NUMBER.size <= len(packet) <= _NUMBER.size + FIRST:
                    told = f"rank {rank} sent a packet of {len(packet)} bytes, which is no note"
                    raise Missing(told, [rank])
                (number,) = _NUMBER.unpack_from(packet)
                if number >= self._number:  # a lower one is left from an interrupted exchange
                    found[rank] = packet[_NUMBER.size :]
                    del missing[rank]
            if not missing:
                return
            waited = time.monotonic() - start
            if waited < _AWAKE:
                os.sched_yield()
            elif not _wait(missing.values(), self._patience - waited):
                raise Missing(f"Timed out waiting {1000 * self._patience:.0f}ms", missing)

    def close(self) -> None:
        """Close all links, which ends the others' waits for this rank."""
        self._closed = True
        _close(self._links)


# the links of each group that has exchanged notes; None if its ranks have none
links_of: WeakKeyDictionary[ProcessGroup, Links | None] = WeakKeyDictionary()
# the number of each rank's machine, of such groups
machines_of: WeakKeyDictionary[ProcessGroup, tuple[int, ...]] = WeakKeyDictionary()
_host_groups: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()


def link(group: ProcessGroup) -> None:
    """Make the links of a group, or none, and find out which ranks share a machine.

    All its ranks call this together, and decide alike.
    """
    over_gloo = partial(gather_over_gloo, group)
    found, machines_of[group] = _rendezvous(
        group.rank(), group.size(), over_gloo, timeout_of(group)
    )
    if found is not None:
        finalize(group, found.close).atexit = False
    links_of[group] = found


def missing(group: ProcessGroup | None) -> list[int]:
    """Return the ranks whose messages a group's links wait for."""
    links = None if group is None else links_of.get(group)
    return [] if links is None else [*links.missing]


def close_links(group: ProcessGroup) -> None:
    """Close a group's links on this rank, if it has any; peers see it at once."""
    if (links := links_of.get(group)) is not None:
        links.close()


def gather_over_gloo(group: ProcessGroup, message: bytes, size: int) -> list[bytes]:
    """Return the message of every rank, padded to that size with zeros."""
    mine = torch.frombuffer(bytearray(message.ljust(size, b"\0")), dtype=torch.uint8)
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_of_them, mine, group=_host_group(group))
    return [ctypes.string_at(t.data_ptr(), size) for t in all_of_them]


def _host_group(group: ProcessGroup) -> ProcessGroup:
    """Return a group of these ranks that moves CPU tensors: the group, or a gloo companion."""
    if "cpu:" in str(dist.get_backend_config(group)):
        return group
    if group not in _host_groups:
        _host_groups[group] = companion(group, dist.get_process_group_ranks(group))
    return _host_groups[group]


def companion(group: ProcessGroup, ranks: Sequence[int]) -> ProcessGroup:
    """Make a gloo group of some of a group's ranks, with its lifetime; only these call this.

    `ranks` are those in the default group.
    """
    made: Any = dist.new_group(
        [*ranks], timeout_of(group), backend="gloo", use_local_synchronization=True
    )
    finalize(group, _end, ref(made)).atexit = False
    return known(made)


def groups_so_far() -> int:
    """Count the process groups of this process, by which PyTorch names the next one.

    Ranks that make a group of some of them must have equally many.
    """
    return len(dist.distributed_c10d._world.pg_names)


def _end(companion: "ref[ProcessGroup]") -> None:
    """Destroy a companion whose group is gone, if it still exists."""
    if dist.is_initialized() and (group := companion()) is not None:
        dist.destroy_process_group(group)


class Reached(NamedTuple):
    """A group's links, None if any rank can't reach another, and the ranks' machines."""

    links: Links | None
    machines: tuple[int, ...]


def _rendezvous(rank: int, size: int, gather: Gather, patience: timedelta) -> Reached:
    """Connect this rank to all others, if all are of one machine; the same on all ranks."""
    subject, links = "whether all ranks share a host", dict[int, socket.socket]()
    with _listening_socket(size) as door:
        try:
            path = b"" if door is None else os.fsencode(door.getsockname())
            told = exchange(gather, subject, path + b"\0" + machine_name().encode())
            paths, _, names = zip(*(each.partition(b"\0") for each in told))
            machines = numbered(names)
            here = b"" not in paths and not any(machines)
            if here:
                links |= _connected(rank, paths[:rank])
            able = here and len(links) == rank
            if b"" in exchange(gather, subject, b"able" if able else b""):
                door = None
            if door is not None:
                links |= _accept(door, range(rank + 1, size))
        except BaseException:
            _close(links)
            raise
    if door is None:
        _close(links)
        return Reached(None, machines)
    for link in links.values():
        link.setblocking(False)
    return Reached(Links(rank, links, patience), machines)


@contextmanager
def _listening_socket(size: int) -> Iterator[socket.socket | None]:
    """Open a socket for this user's processes only; yield None if that is impossible."""
    with ExitStack() as stack:
        door = None
        try:
            if size <= _MOST:
                kind = socket.AF_UNIX, socket.SOCK_SEQPACKET  # messages stay whole
                short = len(os.fsencode(gettempdir())) <= _LONGEST_FOLDER
                place = TemporaryDirectory(
                    prefix="ring_attention_",
                    dir=None if short else "/tmp",
                    ignore_cleanup_errors=True,
                )
                folder = stack.enter_context(place)
                door = stack.enter_context(socket.socket(*kind))
                door.bind(os.path.join(folder, "door"))
                door.listen(size)
                door.settimeout(_PATIENCE)
        except (OSError, AttributeError):  # no temporary files, or another OS
            door = None
        yield door


def _connected(rank: int, paths: Sequence[bytes]) -> dict[int, socket.socket]:
    """Connect to the ranks with these paths, and send them this rank; stop at a failure."""
    links: dict[int, socket.socket] = {}
    with suppress(OSError):
        for other, path in enumerate(paths):
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ExitStack() as stack:
                stack.enter_context(link)
                link.settimeout(_PATIENCE)
                link.connect(path)
                link.send(_RANK.pack(rank))
                stack.pop_all()
            links[other] = link
    return links


def _accept(door: socket.socket, ranks: Iterable[int]) -> dict[int, socket.socket]:
    """Accept connections of these ranks, which have connected already, and close all others.

    Raises:
        Missing: a rank has not connected.
    """
    links: dict[int, socket.socket] = {}
    missing, end = {*ranks}, time.monotonic() + _PATIENCE
    try:
        while missing:
            door.settimeout(max(1e-3, end - time.monotonic()))
            link, _ = door.accept()
            if (rank := _name(link)) in missing:
                missing.remove(rank)
                links[rank] = link
            else:
                link.close()
    except OSError as error:
        _close(links)
        raise Missing(f"nobody has come in {_PATIENCE:g} s", sorted(missing)) from error
    return links


def _name(link: socket.socket) -> int | None:
    """Return the rank that has connected; None if it does not send its number at once."""
    link.settimeout(_HEARD)
    with suppress(OSError):
        said = link.recv(_RANK.size + 1)
        if len(said) == _RANK.size:
            return _RANK.unpack(said)[0]
    return None


def _wait(links: Iterable[socket.socket], seconds: float) -> bool:
    """Wait until a message arrives on a link, or it is closed; return whether one did."""
    poll = select.poll()
    for link in links:
        poll.register(link, select.POLLIN)
    return bool(poll.poll(min(max(0.0, 1000 * seconds), _MOST_MS)))


def _close(links: dict[int, socket.socket]) -> None:
    for link in links.values():
        link.close()
    links.clear()
