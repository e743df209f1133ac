"""Symmetric memory: all ranks of an NVLink domain can read it, in a fixed order of use."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ring_attention_pytorch.comm.messages import Form
from ring_attention_pytorch.ranks.failures import timeout_of
from ring_attention_pytorch.ranks.guard import Barrier, Board
from ring_attention_pytorch.ranks.machines import are_apart, machine_name
from ring_attention_pytorch.ranks.notes import companion, groups_so_far
from ring_attention_pytorch.ranks.ring import Ring, Steps
from ring_attention_pytorch.runtime.graph_pool import outside_graph_pool
from ring_attention_pytorch.runtime.rowwise import has_triton
from ring_attention_pytorch.runtime.streams import capturing, current_stream
from ring_attention_pytorch.runtime.tape import opaque, prepared
from ring_attention_pytorch.schedule.relays import members

_MOST_CACHED = 1024  # views of a buffer, and tables of it
_SLOTS = {"keys": 2, "grads": 2, "swaps": 1}
Mark = torch.cuda.Event | torch.Event


class _HasTable(Protocol):
    @property
    def table(self) -> Tensor: ...


_Table = TypeVar("_Table", bound=_HasTable)


class SymmetricBuffer:
    """A double buffer of one rank that all others read.

    One use takes three steps: write to `write_view`, which switches to the other slot; `publish`, a
    barrier; read the `peer_view` of each rank. All ranks make the same uses in the same order, and
    begin one after they have read the last. Past the barrier, every rank has written this slot and
    none reads the other. `start` chooses the next slot. A buffer with a single slot is written
    through `local_view` after `wait_for_readers`, a barrier that all ranks reach when they have
    finished reading.

    Views of the memory as tensors are cached: with few tokens host time counts.
    """

    memory: Tensor
    slots: list[Tensor]
    handle: object

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        nbytes: int,
        barrier: Callable[[str], Barrier],
        slots: int,
    ) -> None:
        self.nbytes: int = nbytes
        self.slot: int = 0
        self.device: torch.device = device
        self.captured: bool = False
        self.barrier: Callable[[str], Barrier] = barrier
        self.rank: int = group.rank()
        self.memory, self.slots, self.handle = allocate(group, device, (slots, nbytes), torch.uint8)
        self.views: dict[tuple[int, int, Form], list[Tensor]] = {}
        self.tables: dict[Hashable, Any] = {}
        self.read_by_graphs: set[Tensor] = set()  # tables; they live as long as the memory

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """The high-priority side stream, for copies that overlap kernels."""
        return torch.cuda.Stream(self.device, priority=-1)

    def write_view(self, form: Form) -> list[Tensor]:
        """Switch to the other slot, and return its tensors, to write."""
        self.slot = 1 - self.slot
        return self.local_view(form)

    def local_view(self, form: Form) -> list[Tensor]:
        """Return this rank's tensors in the current slot, to write."""
        self.captured = self.captured or capturing(self.device)
        return self.peer_view(self.rank, form)

    @opaque
    def publish(self) -> None:
        """Make the current stream wait until all ranks have published this slot."""
        with torch.cuda.device(self.device):
            self.read_barrier()()

    def read_barrier(self) -> Barrier:
        """Return the barrier that all ranks reach when they have written."""
        return self.barrier("read what is written")

    def peer_view(self, rank: int, form: Form) -> list[Tensor]:
        """Return the tensors that a rank has written in the current slot."""
        asked = self.slot, rank, form
        if asked not in self.views:
            if len(self.views) >= _MOST_CACHED:
                self.views.clear()
            with torch.inference_mode(False):
                self.views[asked] = form.open(self.slots[rank][self.slot])
        return self.views[asked]

    def table(self, key: Hashable, make: Callable[[], _Table]) -> _Table | None:
        """Return the cached table for this key; make it on first use.

        None if a CUDA graph is being captured and there is no table yet. The least recently used
        table is dropped. A table that a graph reads is never freed.
        """
        with torch._C.DisableTorchFunction():  # a tape records the table, not how it was made
            captured = capturing(self.device)
            found = self.tables.pop(key, None)
            if found is None:
                if captured:
                    return None
                if len(self.tables) >= _MOST_CACHED:
                    del self.tables[next(iter(self.tables))]
                found = outside_graph_pool(make, self.device)
            self.tables[key] = found  # the most recent
            if captured:
                self.read_by_graphs.add(found.table)
            elif found.table.is_cuda:
                found.table.record_stream(current_stream(self.device))
            return found

    def side_stream_follows(self) -> None:
        """Make the side stream wait for the work launched so far on the current stream."""
        self.stream.wait_stream(current_stream(self.device))

    def on_side_stream(self) -> AbstractContextManager[None]:
        """Return a context in which calls go to the side stream."""
        return torch.cuda.stream(self.stream)

    def mark(self) -> Mark:
        """Record an event after the work launched so far on the side stream."""
        return self.stream.record_event()

    def join(self, end: Mark) -> None:
        """Make the current stream wait until the side stream has reached `end`."""
        current_stream(self.device).wait_event(end)

    def start(self, slot: int) -> None:
        """Choose the slot that the next `write_view` returns."""
        self.slot = 1 - slot

    @opaque
    def wait_for_readers(self) -> None:
        """Make the current stream wait until all ranks have finished reading."""
        with torch.cuda.device(self.device):
            self.write_barrier()()

    def write_barrier(self) -> Barrier:
        """Return the barrier that all ranks reach when they have finished reading."""
        return self.barrier("write what was read")


@prepared(SymmetricBuffer.publish)
def _(buffer: SymmetricBuffer) -> Barrier:
    return buffer.read_barrier()


@prepared(SymmetricBuffer.wait_for_readers)
def _(buffer: SymmetricBuffer) -> Barrier:
    return buffer.write_barrier()


def allocate(
    group: ProcessGroup, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, list[Tensor], object]:
    """Allocate zeros that all ranks can access; return own memory, every rank's, and a handle.

    All ranks of the group call this together. The memory of one rank alone is any memory.
    """
    if group.size() == 1:
        with torch.inference_mode(False):
            alone = torch.zeros(shape, dtype=dtype, device=device)
        return alone, [alone], None
    import torch.distributed._symmetric_memory as symmetric

    # memory made in inference mode could not be written outside of it, and memory comes from the
    # pool of the current device
    with torch.inference_mode(False), torch.cuda.device(device):
        memory = symmetric.empty(shape, dtype=dtype, device=device).zero_()
        handle = symmetric.rendezvous(memory, group.group_name)
        views = [handle.get_buffer(rank, shape, dtype) for rank in range(group.size())]
        return memory, views, handle


class SymmetricWorkspace:
    """The buffers that the ranks of a group share, for all layers: keys, gradients, all-to-all.

    All of them use the barriers of one `board`, in one order. The group is a `whole` ring or some
    `ranks` of it.
    """

    memory: Tensor
    handle: object
    keys: SymmetricBuffer
    grads: SymmetricBuffer
    swaps: SymmetricBuffer

    def __init__(
        self, group: ProcessGroup, device: torch.device, whole: Ring, ranks: Sequence[int]
    ) -> None:
        self.device: torch.device = device
        self.steps: Steps = whole.steps
        self.memory, boards, self.handle = allocate(group, device, (2, group.size()), torch.int64)
        patience = timeout_of(group).total_seconds()
        self.board: Board = Board(device, group.rank(), boards, patience, ranks)
        for name in _SLOTS:
            setattr(self, name, self._buffer(group, name, 1 << 10))
        self.outgrown: list[SymmetricBuffer] = []  # still used by graphs that were captured
        self.stream: torch.cuda.Stream | None = None  # of the last call

    def _buffer(self, group: ProcessGroup, name: str, nbytes: int) -> SymmetricBuffer:
        barrier = partial(_barrier, self.board, self.steps, name)
        return SymmetricBuffer(group, self.device, nbytes, barrier, _SLOTS[name])

    def begin(self, turns: int, back: bool) -> None:
        """Begin a call that uses the buffer of keys this many times (`turns`).

        The caller of a forward waits for readers before it writes. Slots must not depend on
        earlier calls, because a CUDA graph may replay this one at any time: forward ends with slot
        1, and backward begins with slot 0. A backward needs no barrier first. Its gradients are
        published after all ranks have read the keys, and they are read before the next call
        publishes its keys.
        """
        self.follow_stream()
        self.keys.start(slot=0 if back else turns % 2)
        self.grads.start(slot=0)

    def follow_stream(self) -> None:
        """Wait for the last call, if it ran on another stream."""
        if (stream := current_stream(self.device)) == self.stream or capturing(self.device):
            return  # graphs are replayed on the stream of all other calls
        if self.stream is not None:
            stream.wait_stream(self.stream)
        self.stream = stream

    def wait_copies(self) -> None:
        """Make the current stream wait for all copies on side streams."""
        for buffer in (self.keys, self.grads):
            buffer.join(buffer.mark())

    def reserve(self, group: ProcessGroup, **wanted: int) -> None:
        """Grow the named buffers to at least these bytes. All ranks call this together."""
        for name, nbytes in wanted.items():
            if (old := getattr(self, name)).nbytes < rounded(nbytes):
                larger = self._buffer(group, name, rounded(nbytes))
                torch.cuda.synchronize(self.device)
                Ring(group).gather_notes("larger buffers", b"")  # then no rank reads the old one
                if old.captured:
                    self.outgrown.append(old)
                setattr(self, name, larger)


def _barrier(board: Board, steps: Steps, name: str, why: str) -> Barrier:
    """Return the barrier of a buffer that ranks reach in this call, to read or to write."""
    now = steps.now  # a tape fixes what is told, but not the call
    return board.barrier(f"{now.operation}, to {why}: {name}", now.plan, lambda: steps.now.back_of)


class PeerGroup(NamedTuple):
    """A workspace that some ranks share, its group, and their ranks there."""

    space: SymmetricWorkspace
    group: ProcessGroup
    ranks: tuple[int, ...]


_spaces: WeakKeyDictionary[ProcessGroup, SymmetricWorkspace | None] = WeakKeyDictionary()
_near_spaces: WeakKeyDictionary[ProcessGroup, PeerGroup | None] = WeakKeyDictionary()


def shared_by(ring: Ring, device: torch.device) -> PeerGroup | None:
    """Return the workspace of a ring's ranks; None if they can't share memory.

    All ranks of the group call this together.
    """
    if device.type != "cuda" or (found := ring.shared()) is None:
        return None
    space = space_of(found[0], device)
    return None if space is None else PeerGroup(space, *found)


def space_of(group: ProcessGroup, device: torch.device) -> SymmetricWorkspace | None:
    """Return a group's workspace, made on first use; None if its ranks can't share memory.

    All ranks of the group call this together and get the same answer.
    """
    if group not in _spaces:
        ring = Ring(group)
        notes = ring.gather_notes("hosts", _sharing_host(device).encode())
        alike = b"" not in notes and len(set(notes)) == 1
        _spaces[group] = _agreed_space(ring, group if alike else None, range(ring.size), device)
    return _spaces[group]


def near_by(ring: Ring, device: torch.device, together: int | None = None) -> PeerGroup | None:
    """Return the workspace of this rank's machine; None unless there are several with one each.

    Ranks on other machines are -1 in it. Ranks of the group are neighbours by so many `together`,
    which must be on one machine: by default, those who are in other rings of this size. All ranks
    of the group call this together and get the same answer.
    """
    if device.type != "cuda" or (found := ring.shared()) is None:
        return None
    group, places = found
    whole = Ring(group)
    if not any(whole.machines) or are_apart(whole.machines, together or whole.size // ring.size):
        return None
    if group not in _near_spaces:
        _near_spaces[group] = _near_space(whole, device)
    near = _near_spaces[group]
    if near is None:
        return None
    return near._replace(ranks=tuple(near.ranks[place] for place in places))


def _near_space(whole: Ring, device: torch.device) -> PeerGroup | None:
    """Make the group and the workspace of each machine of a ring; None if any machine has none.

    A group's name has the number of groups before it, so that ranks of a machine must have made
    equally many.
    """
    machines, group = whole.machines, whole.group
    mine = members(machines, machines[whole.rank])
    sharing = str(groups_so_far()) if _sharing_host(device) else ""
    notes = whole.gather_notes("groups of machines", sharing.encode())
    if group is None or b"" in notes or len({*zip(machines, notes)}) != len({*machines}):
        return None
    near = companion(group, [whole.ranks[rank] for rank in mine])
    space = _agreed_space(whole, near, mine, device)
    ranks = tuple(mine.index(rank) if rank in mine else -1 for rank in range(whole.size))
    return None if space is None else PeerGroup(space, near, ranks)


def _agreed_space(
    whole: Ring, group: ProcessGroup | None, ranks: Sequence[int], device: torch.device
) -> SymmetricWorkspace | None:
    """Make the workspace of a group of some ranks; None if any rank of the whole ring has none."""
    space = None
    if group is not None:
        with suppress(RuntimeError):  # no peer access, or no way to share memory
            space = SymmetricWorkspace(group, device, whole, ranks)
        if b"" in whole.gather_notes("space", b"here" if space is not None else b""):
            space = None
    if space is not None:
        whole.steps.watch(space.board)
        space.board.wait_for_all("the first meeting")  # compiles the kernel
    return space


def _sharing_host(device: torch.device) -> str:
    """Return the machine's name; "" if this process can't share memory of this device."""
    if not has_triton():  # barriers are Triton kernels
        return ""
    try:
        import torch.distributed._symmetric_memory  # noqa: F401
    except ImportError:
        return ""
    return machine_name() if device.type == "cuda" else ""


def rounded(nbytes: int) -> int:
    """Round bytes up to whole cache lines, with a gap before the next tensor."""
    return -(-(nbytes + 64) // 512) * 512
