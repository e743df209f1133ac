"""A ring of threads in this process: the cheapest way to run every rank, and the strictest.

Delivery is as late as it may be: a buffer holds NaN until `wait`, and what was sent is read
only when its receiver waits, so a sender that touches it too early is found out.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, Queue
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ring_attention_pytorch.comm import fabric_copies
from ring_attention_pytorch.comm.messages import Form
from ring_attention_pytorch.comm.symmetric_memory import PeerGroup, SymmetricWorkspace, rounded
from ring_attention_pytorch.ranks.machines import are_apart, numbered
from ring_attention_pytorch.ranks.ring import Ring, SubRing
from ring_attention_pytorch.runtime.tape import opaque
from ring_attention_pytorch.schedule.relays import members

PATIENCE = 120.0  # seconds; who waits for nothing hears of it, if late: machines may be busy


class Hub:
    """Memory that the threads of one ring share."""

    def __init__(self, size: int):
        self.size = size
        self.boxes: dict[tuple[int, int, int, int], Queue] = {}  # from, to, tag, how many before
        self.buffers: dict[tuple[str, int], Tensor] = {}
        self.lock = threading.Lock()
        self.notes: list[bytes] = [b""] * size
        self.barrier = threading.Barrier(size, timeout=PATIENCE)
        self.sums = threading.Barrier(size, timeout=PATIENCE)  # sums take no note for one of theirs
        self.failed = threading.Event()
        self.exchanges = [0] * size  # of each rank
        self.sent_bytes = [0] * size
        self.gathers = [0] * size
        self.summed: list[Tensor] = [torch.empty(0)] * size
        self.machines = (0,) * size  # of each rank
        self.parts: dict[int, Hub] = {}  # what the ranks of each machine share
        self.ways = Counter[tuple[int, int]]()  # bytes sent, by sender and receiver

    def box(self, sender: int, receiver: int, tag: int, number: int) -> Queue:
        """Where one message lies: they match by tags, and in the order in which they are posted."""
        with self.lock:
            return self.boxes.setdefault((sender, receiver, tag, number), Queue())

    def part(self, machine: int) -> "Hub":
        """Return the hub of a machine's ranks."""
        with self.lock:
            return self.parts.setdefault(machine, Hub(numbered(self.machines).count(machine)))

    def fail(self) -> None:
        """Let no rank wait for one that has failed."""
        self.failed.set()
        for hub in (self, *self.parts.values()):
            hub.barrier.abort()
            hub.sums.abort()

    def patiently(self, attempt: Callable[[float], bool], what: str) -> None:
        """Try until it succeeds, patience ends or another rank has failed."""
        deadline = time.monotonic() + PATIENCE
        while not attempt(0.05):
            if self.failed.is_set():
                raise threading.BrokenBarrierError(what)
            if time.monotonic() > deadline:
                raise TimeoutError(what)


class ThreadRing(Ring):
    def __init__(self, hub: Hub, rank: int):
        self.rank, self.size, self.first, self.group = rank, hub.size, 0, None
        self.join(hub)

    @property
    def machines(self) -> tuple[int, ...]:
        return numbered(self.hub.machines)

    def join(self, hub: Hub) -> None:
        """Take part in another run, as this rank."""
        self.hub, self.sent, self.awaited = hub, Counter(), Counter()
        self.near: ThreadSpace | None = None  # what this rank shares with its machine

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> "ThreadTransfer":
        self.hub.exchanges[self.rank] += 1
        tag, taken = self.steps.tag(), []
        for rank, t in sends:
            assert rank != self.rank, "a message to oneself"
            assert t.is_contiguous()
            taken.append(threading.Event())
            of_size = tag ^ t.nbytes  # as in `Ring.exchange`
            self.hub.box(self.rank, rank, of_size, self.sent[rank, of_size]).put((t, taken[-1]))
            self.sent[rank, of_size] += 1
            self.hub.sent_bytes[self.rank] += t.nbytes
            with self.hub.lock:
                self.hub.ways[self.rank, rank] += t.nbytes
        mail = []
        for rank, t in receives:
            of_size = tag ^ t.nbytes
            mail.append((self.hub.box(rank, self.rank, of_size, self.awaited[rank, of_size]), t))
            self.awaited[rank, of_size] += 1
            # bytes of ones are NaN in every floating dtype
            t.fill_(torch.nan if t.is_floating_point() else 255 if t.dtype == torch.uint8 else 1)
        return ThreadTransfer(self.hub, mail, taken)

    def gather_bytes(self, message: bytes, size: int) -> list[bytes]:
        self.hub.gathers[self.rank] += 1
        self.hub.notes[self.rank] = message.ljust(size, b"\0")
        self.hub.barrier.wait()
        notes = list(self.hub.notes)
        self.hub.barrier.wait()
        return notes

    def total(self, t: Tensor) -> None:
        self.hub.summed[self.rank] = t.clone()
        self.hub.sums.wait()
        t.copy_(sum(self.hub.summed))
        self.hub.sums.wait()


class PartRing(SubRing):
    """One of several rings of so many threads each; all of them, one group, agree."""

    several = True

    def __init__(self, whole: ThreadRing, size: int):
        first = whole.rank - whole.rank % size
        super().__init__(whole, range(first, first + size))
        self.first = first

    def gather_bytes(self, message: bytes, size: int) -> list[bytes]:
        return self.whole.gather_bytes(message, size)


class ThreadTransfer:
    def __init__(self, hub: Hub, mail: list[tuple[Queue, Tensor]], taken: list[threading.Event]):
        self.hub, self.mail, self.taken = hub, mail, taken

    def wait(self) -> list[Tensor]:
        for queue, buffer in self.mail:
            found = []

            def take(seconds: float, queue: Queue = queue, found: list = found) -> bool:
                try:
                    found.append(queue.get(timeout=seconds))
                except Empty:
                    return False
                return True

            self.hub.patiently(take, "a message never came")
            sent, event = found.pop()
            assert (sent.shape, sent.dtype) == (buffer.shape, buffer.dtype), "not what was expected"
            buffer.copy_(sent)
            del sent  # its sender counts what is alive
            event.set()
        for event in self.taken:
            self.hub.patiently(event.wait, "a message was never taken")
        return [buffer for _, buffer in self.mail]


class ThreadBuffer:
    """A `SymmetricBuffer` of threads: what is not written this turn is NaN.

    What is copied or added beside (`late`) is so when somebody waits for it, and not before.
    """

    def __init__(self, hub: Hub, name: str, rank: int):
        self.hub, self.name, self.rank, self.slot = hub, name, rank, 0
        self.told: list[Callable[[], object]] = []
        self.done = 0
        self.views: dict[tuple, list[Tensor]] = {}

    def write_view(self, form: Form) -> list[Tensor]:
        self.slot = 1 - self.slot
        self.hub.buffers[self.name, self.rank][self.slot].fill_(255)
        return self.peer_view(self.rank, form)

    def local_view(self, form: Form) -> list[Tensor]:
        return self.peer_view(self.rank, form)

    @opaque
    def publish(self) -> None:
        self.hub.barrier.wait()

    @opaque
    def wait_for_readers(self) -> None:
        self.hub.barrier.wait()

    def start(self, slot: int) -> None:
        self.slot = 1 - slot

    def peer_view(self, rank: int, form: Form) -> list[Tensor]:
        asked = self.slot, rank, form
        if asked not in self.views:
            self.views[asked] = form.open(self.hub.buffers[self.name, rank][self.slot])
        return self.views[asked]

    def table(self, *_: object) -> None:
        """There is none: kernels that go through tables are tested by themselves."""

    def side_stream_follows(self) -> None:
        pass

    @contextmanager
    def on_side_stream(self) -> Iterator[None]:
        _beside.buffer = self
        yield
        _beside.buffer = None

    def mark(self) -> int:
        return len(self.told)

    def join(self, end: int) -> None:
        for run in self.told[self.done : end]:
            run()
        self.done = max(self.done, end)


class ThreadBoard:
    """A `Board` of threads, none of which is ever out of step."""

    @opaque
    def fill_nan(self, *tensors: Tensor) -> None:
        pass


class _Beside(threading.local):
    """The buffer to whose side stream this thread launches now."""

    buffer: ThreadBuffer | None = None


_beside = _Beside()


@contextmanager
def late() -> Iterator[None]:
    """Copies and sums beside are as on a stream of its own, that is as late as can be."""
    with (
        mock.patch.object(fabric_copies, "_copy", _later(fabric_copies._copy)),
        mock.patch.object(fabric_copies, "add_", _later(fabric_copies.add_)),
    ):
        yield


def _later(do: Callable[..., object]) -> Callable[..., None]:
    def tell(place: Tensor, *parts: Tensor, **how: bool) -> None:
        assert _beside.buffer is not None
        place.fill_(True if place.dtype == torch.bool else torch.nan)
        _beside.buffer.told.append(lambda: do(place, *parts, **how))

    return tell


class ThreadSpace(SymmetricWorkspace):
    """A `SymmetricWorkspace` of threads; on one device it is that of them all."""

    def __init__(self, hub: Hub, rank: int, device: torch.device | None = None):
        self.hub, self.rank, self.device = hub, rank, device or torch.device("cpu")
        self.board = ThreadBoard()
        for name in ("keys", "grads", "swaps"):
            setattr(self, name, ThreadBuffer(hub, name, rank))

    def follow_stream(self) -> None:
        pass

    def reserve(self, group: None, **wanted: int) -> None:
        self.hub.barrier.wait()  # others may still read the memory that this replaces
        for name, nbytes in wanted.items():
            halves = 1 if name == "swaps" else 2
            before = self.hub.buffers.get((name, self.rank))
            most = max(rounded(nbytes), 0 if before is None else before.shape[1])
            memory = torch.full((halves, most), 255, dtype=torch.uint8, device=self.device)
            self.hub.buffers[name, self.rank] = memory
            setattr(self, name, ThreadBuffer(self.hub, name, self.rank))
        self.hub.barrier.wait()
        for name in wanted:
            sizes = {self.hub.buffers[name, rank].shape for rank in range(self.hub.size)}
            assert len(sizes) == 1, "not the same on all ranks"
        self.hub.barrier.wait()


def shared_by(ring: ThreadRing, _: torch.device | None = None) -> PeerGroup:
    """Return the memory that the ranks of a ring share; all of them ask together."""
    return PeerGroup(ThreadSpace(ring.hub, ring.rank), None, tuple(range(ring.size)))


def near_by(
    ring: Ring, device: torch.device | None = None, together: int | None = None
) -> PeerGroup | None:
    """Return the memory that a machine's ranks share; all ranks of the ring ask together."""
    whole, places = ring, range(ring.size)
    if isinstance(ring, SubRing):
        whole, places = ring.whole, ring.places
    machines = whole.machines
    if are_apart(machines, together or whole.size // ring.size):
        return None
    machine = machines[whole.rank]
    mine = members(machines, machine)
    whole.near = whole.near or ThreadSpace(whole.hub.part(machine), mine.index(whole.rank), device)
    ranks = tuple(mine.index(place) if place in mine else -1 for place in places)
    return PeerGroup(whole.near, None, ranks)


def run(
    size: int, rank_main: Callable[[ThreadRing], Any], machines: Sequence[int] = ()
) -> tuple[list[Any], Hub]:
    """`rank_main(ring)` on every rank of a ring; every rank's result, and the hub's counts.

    The first error of any rank is raised, and the other ranks stop waiting.
    """
    hub, results, errors = Hub(size), [None] * size, []
    hub.machines = tuple(machines) or hub.machines

    def main(rank: int) -> None:
        try:
            results[rank] = rank_main(ThreadRing(hub, rank))
        except BaseException as error:  # handed to the caller's thread
            errors.append(error)
            hub.fail()

    threads = [threading.Thread(target=main, args=(r,), daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    if errors:
        real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
        raise (real or errors)[0]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    assert all(queue.empty() for queue in hub.boxes.values()), "a message that nobody took"
    return results, hub
