"""Links between the ranks of a group that share a host: notes take 20 us there, and 200 over gloo.

gloo hands each message to threads of its own, which costs four changes of thread. Sockets of the
host cost none: the kernel wakes who waits, as a message comes or as a process ends. Whether a group
has links is decided once, by all its ranks together: each must have reached every other one.
"""

import os
import select
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from tempfile import TemporaryDirectory
from weakref import WeakKeyDictionary, finalize

from torch.distributed import ProcessGroup

from ring_attention_pytorch.ranks.failures import Missing, timeout_of
from ring_attention_pytorch.ranks.failures import links as all_links
from ring_attention_pytorch.ranks.notes import FIRST, Gather, exchange

_MOST = 16  # ranks of a group with links: each is linked with every other one
_NUMBER = struct.Struct("<Q")
_RANK = struct.Struct("<I")
_MOST_MS = 1e9  # that a system can be asked to wait
_PATIENCE = 5.0  # seconds to reach or let in a rank that is there
_HEARD = 0.5  # seconds for its name, which a rank has sent before
_AWAKE = 50e-6  # seconds to look for messages before sleeping, from which to wake takes as long


class Links:
    """Links of this rank with all others of its group, by their ranks.

    Like a gloo group they are closed, on all ranks, when a message does not come within `patience`,
    when a rank ends, or when it fails in a block of `fail_together`.
    """

    def __init__(self, rank: int, links: Mapping[int, socket.socket], patience: timedelta) -> None:
        self._rank, self._links, self._patience = rank, dict(links), patience.total_seconds()
        self._number, self._closed = 0, False  # the number of the exchange
        self.missing: dict[int, socket.socket] = {}  # whose messages this exchange waits for
        all_links.add(self)

    def gather(self, message: bytes, size: int) -> list[bytes]:
        """Return the message of every rank, at most `FIRST` bytes, filled up to `size` with zeros.

        Raises:
            Missing: a rank did not come in time, or is gone; it names the ranks that are missing.
        """
        if self._closed:
            raise Missing("Connection closed", ())
        self._number += 1
        found = {self._rank: message}
        try:
            self._send(_NUMBER.pack(self._number) + message)
            self._receive(found)
        except Missing:
            self.close()
            raise
        return [found[rank].ljust(size, b"\0") for rank in sorted(found)]

    def _send(self, packet: bytes) -> None:
        for rank, link in self._links.items():
            try:
                link.send(packet, socket.MSG_NOSIGNAL)
            except OSError as error:
                raise Missing(f"Connection closed: {error}", [rank]) from error

    def _receive(self, found: dict[int, bytes]) -> None:
        """Add the others' messages to those that are found, in the order in which they come."""
        self.missing = missing = dict(self._links)
        start = time.monotonic()
        while missing:
            for rank, link in [*missing.items()]:
                if (came := self._came(rank, link)) is not None:
                    found[rank] = came
                    del missing[rank]
            if not missing:
                return
            waited = time.monotonic() - start
            if waited < _AWAKE:
                os.sched_yield()
            elif not _wait(missing.values(), self._patience - waited):
                raise Missing(f"Timed out waiting {1000 * self._patience:.0f}ms", missing)

    def _came(self, rank: int, link: socket.socket) -> bytes | None:
        """Return the message of this exchange from a rank; None if it has not come yet."""
        while True:
            try:
                packet = link.recv(_NUMBER.size + FIRST + 1)
            except BlockingIOError:
                return None
            except OSError:  # it has ended, and left something unread
                packet = b""
            if not packet:
                raise Missing("Connection closed", [rank])
            if not _NUMBER.size <= len(packet) <= _NUMBER.size + FIRST:
                told = f"rank {rank} sent a packet of {len(packet)} bytes, which is no note"
                raise Missing(told, [rank])
            (number,) = _NUMBER.unpack_from(packet)
            if number >= self._number:  # else an interrupted exchange has left it
                return packet[_NUMBER.size :]

    def close(self) -> None:
        """Close all links, which ends the others' waits for this rank."""
        self._closed = True
        _close(self._links)


_links: WeakKeyDictionary[ProcessGroup, Links | None] = WeakKeyDictionary()


def links_of(group: ProcessGroup, gather: Gather) -> Links | None:
    """Return the links of a group, made when first asked for; None where its ranks have none.

    All ranks of the group call this together, and get the same answer by way of `gather`.
    """
    if group not in _links:
        found = _meet(group.rank(), group.size(), gather, timeout_of(group))
        if found is not None:
            finalize(group, found.close).atexit = False
        _links[group] = found
    return _links[group]


def missing(group: ProcessGroup | None) -> list[int]:
    """Return whose messages are waited for by way of a group's links."""
    links = None if group is None else _links.get(group)
    return [] if links is None else [*links.missing]


def close_links(group: ProcessGroup) -> None:
    """Close the links of a group on this rank, if it has some: others hear of it at once."""
    if (links := _links.get(group)) is not None:
        links.close()


def _meet(rank: int, size: int, gather: Gather, patience: timedelta) -> Links | None:
    """Link this rank with all others; return None, on all ranks, if any can't reach another."""
    subject, links = "whether all ranks share a host", dict[int, socket.socket]()
    with _open_door(size) as door:
        try:
            paths = exchange(
                gather, subject, b"" if door is None else os.fsencode(door.getsockname())
            )
            if b"" not in paths:
                links |= _connected(rank, paths[:rank])
            able = b"" not in paths and len(links) == rank
            if b"" in exchange(gather, subject, b"able" if able else b""):
                door = None
            if door is not None:
                links |= _let_in(door, range(rank + 1, size))
        except BaseException:
            _close(links)
            raise
    if door is None:
        _close(links)
        return None
    for link in links.values():
        link.setblocking(False)
    return Links(rank, links, patience)


@contextmanager
def _open_door(size: int) -> Iterator[socket.socket | None]:
    """Open a socket to which only this user's processes can connect; None where there is no way."""
    with ExitStack() as stack:
        door = None
        try:
            if size <= _MOST:
                kind = socket.AF_UNIX, socket.SOCK_SEQPACKET  # messages stay whole
                folder = stack.enter_context(
                    TemporaryDirectory(prefix="ring_attention_", ignore_cleanup_errors=True)
                )
                door = stack.enter_context(socket.socket(*kind))
                door.bind(os.path.join(folder, "door"))
                door.listen(size)
                door.settimeout(_PATIENCE)
        except (OSError, AttributeError):  # no place for files, or another system
            door = None
        yield door


def _connected(rank: int, paths: Sequence[bytes]) -> dict[int, socket.socket]:
    """Connect to the ranks that have these paths, and tell them who is there; stop at a failure."""
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


def _let_in(door: socket.socket, ranks: Iterable[int]) -> dict[int, socket.socket]:
    """Accept these ranks, which have connected before, and nobody else.

    Raises:
        Missing: one is not there.
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
    """Return who has connected; None if it does not say so, as a rank does at once."""
    link.settimeout(_HEARD)
    with suppress(OSError):
        said = link.recv(_RANK.size + 1)
        if len(said) == _RANK.size:
            return _RANK.unpack(said)[0]
    return None


def _wait(links: Iterable[socket.socket], seconds: float) -> bool:
    """Wait until a message has come by one of the links, or its end; tell whether one has."""
    poll = select.poll()
    for link in links:
        poll.register(link, select.POLLIN)
    return bool(poll.poll(min(max(0.0, 1000 * seconds), _MOST_MS)))


def _close(links: dict[int, socket.socket]) -> None:
    for link in links.values():
        link.close()
    links.clear()
