"""Gathering by copy engines, out of memory that all ranks of an NVLink domain can read.

A rank writes its keys, or the gradients of others' keys, into its own shelf; the others pull
what they need on a stream of its own, by copies between contiguous memory, which take no
multiprocessors. An owner adds the gradients that it pulled in one order. What neighbours swap for
Ulysses is read where it lies.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ring_attention_pytorch.contract import Keys
from ring_attention_pytorch.layouts import count
from ring_attention_pytorch.ring import Ring
from ring_attention_pytorch.running import Sum
from ring_attention_pytorch.transports.gather import Gather
from ring_attention_pytorch.transports.messages import Form, Part, form_of, opened
from ring_attention_pytorch.transports.pieces import Blocks, Group, places, schedule, tokens

_VIEWS = 1024  # of a shelf that are kept


class Source(NamedTuple):
    """What this rank takes out of another's message of so many tokens, and where it puts it."""

    rank: int  # in the group that the space is of
    length: int
    moves: tuple[tuple[slice, slice], ...]  # from there to here


class Shelf:
    """Memory of one rank that all others read, in halves that are written in turn, if in two.

    Each turn is `own`, to write, `publish`, and `of`, to read the others'; all ranks take the
    same turns, and come to one when they have read what the last one brought. Who passes the
    barrier of a turn knows that all have written this half, and that nobody reads the other.

    Its stream is for what goes on beside kernels. It goes first where both could: what it does is
    short, and waited for. Memory is looked at as tensors of a form; views are kept, for where
    tokens are few the host's time counts.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, nbytes: int, halves: int = 2):
        import torch.distributed._symmetric_memory as symmetric

        self.nbytes, self.turn, self.device, self.captured = nbytes, 0, device, False
        self.stream = torch.cuda.Stream(device, priority=-1)
        with torch.inference_mode(False):  # else nobody could write it outside of that
            self.memory = symmetric.empty((halves, nbytes), dtype=torch.uint8, device=device)
            self.handle = symmetric.rendezvous(self.memory, group.group_name)
            self.halves = [
                self.handle.get_buffer(rank, (halves, nbytes), torch.uint8)
                for rank in range(group.size())
            ]
        self.views: dict[tuple[int, int, Form, int], list[Tensor]] = {}

    def own(self, form: Form) -> list[Tensor]:
        """The half that is to be written next."""
        self.turn = 1 - self.turn
        return self.mine(form)

    def mine(self, form: Form, start: int = 0) -> list[Tensor]:
        """The half at hand, from so many bytes on, to write."""
        self.captured = self.captured or torch.cuda.is_current_stream_capturing()
        return self.of(self.handle.rank, form, start)

    def publish(self) -> None:
        """Pass when all have come here."""
        self.handle.barrier(channel=0)

    def of(self, rank: int, form: Form, start: int = 0) -> list[Tensor]:
        """What a rank has written this turn."""
        asked = self.turn, rank, form, start
        if asked not in self.views:
            if len(self.views) >= _VIEWS:
                self.views.clear()
            with torch.inference_mode(False):
                self.views[asked] = opened(self.halves[rank][self.turn, start:], form)
        return self.views[asked]

    def follow(self) -> None:
        """Let the stream wait for what the current one was told so far."""
        self.stream.wait_stream(current_stream(self.device))

    def beside(self) -> AbstractContextManager[None]:
        """On the stream."""
        return torch.cuda.stream(self.stream)

    def done(self) -> torch.cuda.Event:
        """An event for what the stream was told so far."""
        return self.stream.record_event()

    def wait(self, done: torch.cuda.Event) -> None:
        """Let the current stream wait for it."""
        current_stream(self.device).wait_event(done)

    def start(self, half: int) -> None:
        """Let the next turn be of this half."""
        self.turn = 1 - half

    def meet(self) -> None:
        """Pass when all have read what they were brought."""
        self.handle.barrier(channel=1)


class Space:
    """All that the ranks of a group share: a few shelves, for all layers."""

    def __init__(self, group: ProcessGroup, device: torch.device):
        self.device = device
        self.keys, self.grads = (Shelf(group, device, 1 << 10) for _ in range(2))
        self.swaps = Shelf(group, device, 1 << 10, halves=1)
        self.outgrown: list[Shelf] = []  # which CUDA graphs still use
        self.stream: torch.cuda.Stream | None = None  # of the last call

    def begin(self, turns: int, back: bool) -> None:
        """Of a call with so many turns of keys: it writes nothing that may still be read.

        Which half it takes depends on nothing that came before it, for a CUDA graph may be what
        comes next. Forward ends with the second half, backward begins with the first, and whoever
        passed the barriers of a backward knows that all have read everything.
        """
        self.follow_stream()
        self.keys.start(half=0 if back else turns % 2)
        self.grads.start(half=0)
        if not back:
            self.keys.meet()

    def follow_stream(self) -> None:
        """Where the call before was on another stream, wait for that."""
        if (stream := current_stream(self.device)) == self.stream:
            return
        with torch.cuda.device(self.device):
            if not torch.cuda.is_current_stream_capturing():  # a graph's calls are on one stream
                if self.stream is not None:
                    stream.wait_stream(self.stream)
                self.stream = stream

    def make_room(self, group: ProcessGroup, **wanted: int) -> None:
        """At least so many bytes on the shelves of these names. All ranks call this together."""
        for name, nbytes in wanted.items():
            if (old := getattr(self, name)).nbytes < _room(nbytes):
                larger = Shelf(group, self.device, _room(nbytes), len(old.memory))
                torch.cuda.synchronize(self.device)
                Ring(group).gather_bytes(b"")  # nobody reads the old one any more
                if old.captured:
                    self.outgrown.append(old)
                setattr(self, name, larger)


_spaces: WeakKeyDictionary[ProcessGroup, Space | None] = WeakKeyDictionary()


def space_of(group: ProcessGroup, device: torch.device) -> Space | None:
    """The space of a group, made when first asked for; None where its ranks can't have one.

    All ranks of the group call this together and get the same answer.
    """
    if group not in _spaces:
        ring, space = Ring(group), None
        notes = [note.decode() for note in ring.gather_bytes(_place(device).encode())]
        if "" not in notes and len(set(notes)) == 1:
            try:
                space = Space(group, device)
            except RuntimeError:  # no peer access, or no way to share memory
                space = None
            if b"" in ring.gather_bytes(b"here" if space is not None else b""):
                space = None
        _spaces[group] = space
    return _spaces[group]


def _place(device: torch.device) -> str:
    """The machine, if this process can share memory of this device at all."""
    try:
        import torch.distributed._symmetric_memory  # noqa: F401
    except ImportError:
        return ""
    return socket.gethostname() if device.type == "cuda" else ""


class SharedSwap(NamedTuple):
    """Neighbours' messages to one another, each read where its sender wrote it."""

    space: Space
    group: ProcessGroup  # that the space is of
    ranks: tuple[int, ...]  # of the neighbours, in it

    @classmethod
    def among(cls, neighbours: Ring, device: torch.device) -> "SharedSwap | None":
        """None where they can't share memory. All ranks of the group call this together."""
        shared = neighbours.shared() if device.type == "cuda" else None
        space = None if shared is None else space_of(shared[0], device)
        return None if space is None else cls(space, *shared)

    def swap(
        self, me: int, pieces: Sequence[Sequence[Tensor]], forms: Sequence[Form], most: int
    ) -> list[Sequence[Tensor]]:
        """To each place its pieces; and what each has for this one, for reading at once.

        No message has more bytes than `most`.
        """
        each = _room(most)
        if self.space.swaps.nbytes < each * len(pieces):
            self.space.make_room(self.group, swaps=each * len(pieces))
        shelf = self.space.swaps
        self.space.follow_stream()
        shelf.meet()
        for place, theirs in enumerate(pieces):
            if place != me:
                form = tuple(Part(tuple(t.shape), t.dtype) for t in theirs)
                for there, t in zip(shelf.mine(form, place * each), theirs):
                    there.copy_(t)
        shelf.publish()
        return [
            pieces[me] if rank == self.ranks[me] else shelf.of(rank, form, me * each)
            for rank, form in zip(self.ranks, forms)
        ]


@dataclass(frozen=True)
class SymmetricGather(Gather):
    """`Gather` where messages are replaced by pulls.

    `ranks` are those of the ring in the group that the space is of; `sources` what has to move
    for each group of owners, once that is worked out.
    """

    space: Space
    ranks: tuple[int, ...]
    sources: dict[tuple[str, int], list[Source]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def over(
        cls,
        ring: Ring,
        blocks: Blocks,
        at_once: int,
        token_bytes: int,
        shared: tuple[ProcessGroup, tuple[int, ...]],
        space: Space,
    ) -> "SymmetricGather":
        """With room for tokens of so many bytes, their mask included."""
        groups = schedule(blocks, at_once)
        lengths = tuple(map(count, blocks.keys))
        widest = max((tokens(p) for g in groups for p in g.pieces), default=0)
        space.make_room(shared[0], keys=max(lengths) * token_bytes, grads=widest * token_bytes)
        return cls(ring, groups, lengths, space, shared[1])

    def stream(self, keys: Keys) -> Iterator[Keys]:
        if self.groups:
            self.space.begin(len(self.groups), back=False)
        return super().stream(keys)

    def stream_back(
        self, own_keys: Keys, own: tuple[Sum, Sum]
    ) -> Iterator[tuple[Keys, tuple[Sum, Sum]]]:
        if self.groups:
            self.space.begin(len(self.groups), back=True)
        return super().stream_back(own_keys, own)

    def _pull(self, own: Keys, group: Group) -> Callable[[], list[Tensor]]:
        shelf, sources = self.space.keys, self._of_keys(group)
        tensors = [t for t in own[:3] if t is not None]
        length = max((here.stop for each in sources for _, here in each.moves), default=0)
        whole = [_empty_like(t, length) for t in tensors]
        for place, t in zip(shelf.own(form_of(tensors, own.k.shape[1])), tensors):
            place.copy_(t)
        # before the kernel that runs beside the copies: else it might have to wait for room there
        shelf.publish()
        shelf.follow()

        def pull() -> list[Tensor]:
            # told to the device only now, when that kernel has been launched
            with shelf.beside():
                for rank, length, moves in sources:  # each rank begins with another one
                    for place, t in zip(whole, shelf.of(rank, form_of(tensors, length))):
                        for there, here in moves:
                            _copy(place[:, here], t[:, there])
            shelf.wait(shelf.done())
            return whole

        return pull

    def _send_home(
        self,
        group: Group,
        own_keys: Keys,
        grads: tuple[Sum, Sum] | None,
        own: tuple[Sum, Sum],
    ) -> Callable[[], None]:
        shelf, kinds, sources = self.space.grads, own_keys[:2], self._of_grads(group)
        memory = shelf.own(form_of(kinds, tokens(group.pieces[self.ring.rank])))
        for place, total in zip(memory, grads or ()):
            total.write(place)
        found = [
            (rank, theirs, there, here, [_empty_like(t, here.stop - here.start) for t in kinds])
            for rank, theirs, moves in sources
            for there, here in moves
        ]
        shelf.publish()  # it is everyone's turn, be there nothing to write
        shelf.follow()

        def wait() -> None:
            with shelf.beside():
                for rank, theirs, there, _, parts in found:
                    for part, t in zip(parts, shelf.of(rank, form_of(kinds, theirs))):
                        _copy(part, t[:, there])
            shelf.wait(shelf.done())
            for i, total in enumerate(own):
                total.add_all((here, parts[i]) for *_, here, parts in found)

        return wait

    def _of_keys(self, group: Group) -> list[Source]:
        """Out of each owner's keys, what this rank needs of them."""
        if ("keys", id(group)) not in self.sources:
            pieces = group.pieces[self.ring.rank]
            self.sources["keys", id(group)] = [
                Source(
                    self.ranks[owner],
                    self.lengths[owner],
                    tuple((piece.cols, here) for piece, here in places(pieces, owner)),
                )
                for owner in self._owners(group.distances)
            ]
        return self.sources["keys", id(group)]

    def _of_grads(self, group: Group) -> list[Source]:
        """Out of what each user found, the gradients of own keys."""
        if ("grads", id(group)) not in self.sources:
            self.sources["grads", id(group)] = [
                Source(
                    self.ranks[user],
                    tokens(group.pieces[user]),
                    tuple(
                        (there, piece.cols)
                        for piece, there in places(group.pieces[user], self.ring.rank)
                    ),
                )
                for user in self._users(group.distances)
            ]
        return self.sources["grads", id(group)]


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """By the number of the device, which takes the host a tenth of the time."""
    return torch.cuda.current_stream(device.index)


def _room(nbytes: int) -> int:
    """With what may lie between tensors; the next half starts at a whole line, for any dtype."""
    return -(-(nbytes + 64) // 512) * 512


def _empty_like(t: Tensor, length: int) -> Tensor:
    """[b, length, ...]"""
    return t.new_empty((t.shape[0], length, *t.shape[2:]))


def _copy(place: Tensor, t: Tensor) -> None:
    """Sample by sample: what is contiguous goes by copy engine."""
    for sample, given in zip(place, t) if len(t) > 1 else ((place, t),):
        sample.copy_(given)
