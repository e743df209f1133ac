"""Gathering by copy engines, out of memory that all ranks of an NVLink domain can read.

A rank writes its keys, or the gradients of others' keys, into its own shelf; the others pull
what they need on a stream of its own. Whoever pulls keys does so by copies between contiguous
memory, which take no multiprocessors; an owner adds the gradients that it pulls in one order.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ring_attention_pytorch.contract import Keys
from ring_attention_pytorch.layouts import count
from ring_attention_pytorch.ring import Ring
from ring_attention_pytorch.running import Sum
from ring_attention_pytorch.transports.gather import Gather
from ring_attention_pytorch.transports.messages import form_of, message_bytes, opened, packed
from ring_attention_pytorch.transports.pieces import (
    Blocks,
    Group,
    Pieces,
    Round,
    of_owner,
    schedule,
    tokens,
)


class Done(Protocol):
    """An event of the device."""

    def wait(self) -> None:
        """Let the current stream wait for it."""


class Shelf:
    """Memory of one rank that all others read, in two halves that are written in turn.

    Each turn is `own`, to write, and `published`, to read the others'; all ranks take the same
    turns. There is one barrier a turn: who passes it knows that all have written this half,
    and that nobody still reads the other, for its readers came to this barrier after that.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, nbytes: int):
        import torch.distributed._symmetric_memory as symmetric

        self.nbytes, self.turn, self.device = nbytes, 0, device
        self.memory = symmetric.empty((2, nbytes), dtype=torch.uint8, device=device)
        self.handle = symmetric.rendezvous(self.memory, group.group_name)
        self.halves = [
            self.handle.get_buffer(rank, (2, nbytes), torch.uint8) for rank in range(group.size())
        ]

    def begin(self) -> None:
        """Nobody reads either half any more."""
        self.turn, self.passed = 0, torch.cuda.Event()

    def own(self) -> Tensor:
        """The half that is to be written next, on the current stream."""
        self.turn += 1
        if self.turn > 2:
            self.passed.wait()
        return self.memory[self.turn % 2]

    def written(self) -> torch.cuda.Event:
        """An event of the current stream, when all is written that is to be read."""
        return torch.cuda.current_stream(self.device).record_event()

    @contextmanager
    def published(self, stream: torch.cuda.Stream, written: torch.cuda.Event) -> Iterator[Done]:
        """On that stream, after all have written; what is yielded comes when the block is over."""
        stream.wait_event(written)
        done = torch.cuda.Event()
        with torch.cuda.stream(stream):
            self.handle.barrier(channel=0)
            self.passed.record()
            yield done
            done.record()

    def of(self, rank: int) -> Tensor:
        """What a rank has written this turn."""
        return self.halves[rank][self.turn % 2]


class Space:
    """All that the ranks of a group share: two shelves, for all layers, and a stream."""

    def __init__(self, group: ProcessGroup, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.keys, self.grads = (Shelf(group, device, 1 << 10) for _ in range(2))

    def begin(self) -> None:
        """Wait, on the current stream, until nobody reads what was written before.

        So a call depends on no event of another, and may be captured in a CUDA graph.
        """
        if not torch.cuda.is_current_stream_capturing():
            # the call before may have been on another stream; a graph's is over when it ends
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self.keys.handle.barrier(channel=1)
        self.keys.begin()
        self.grads.begin()

    def make_room(self, group: ProcessGroup, keys: int, grads: int) -> None:
        """At least so many bytes on each shelf. All ranks call this together."""
        for name, nbytes in (("keys", keys), ("grads", grads)):
            if getattr(self, name).nbytes < nbytes:
                larger = Shelf(group, self.device, nbytes)
                torch.cuda.synchronize(self.device)
                Ring(group).gather_bytes(b"")  # nobody reads the old one any more
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


@dataclass(frozen=True)
class SymmetricGather(Gather):
    """`Gather` where messages are replaced by pulls.

    `ranks` are those of the ring in the group that the space is of.
    """

    space: Space
    ranks: tuple[int, ...]

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
        widest = max((tokens(p) for g in groups for r in g.rounds for p in r), default=0)
        space.make_room(shared[0], *(_room(n * token_bytes) for n in (max(lengths), widest)))
        return cls(ring, groups, lengths, space, shared[1])

    def _blocks(self, own: Keys) -> Iterator[tuple[Group | None, Round, Keys | None]]:
        self.space.begin()
        return super()._blocks(own)

    def _pull(self, own: Keys, group: Group) -> Callable[[], list[Tensor]]:
        rank, space = self.ring.rank, self.space
        tensors = [t for t in own[:3] if t is not None]
        form = form_of(tensors, own.k.shape[1])
        packed(tensors, form, into=space.keys.own()[: message_bytes(form)])
        pieces = group.pieces(rank)
        whole = [t.new_empty((t.shape[0], tokens(pieces), *t.shape[2:])) for t in tensors]
        starts = dict(zip(pieces, accumulate((p.segment.length for p in pieces), initial=0)))
        written = space.keys.written()

        def pull() -> list[Tensor]:
            # told to the device only now, when the kernel that runs beside it has been launched
            with space.keys.published(space.stream, written) as done:
                for owner in self._owners(group.distances):  # each rank begins with another one
                    theirs = form_of(tensors, self.lengths[owner])
                    message = space.keys.of(self.ranks[owner])[: message_bytes(theirs)]
                    for place, t in zip(whole, opened(message, theirs)):
                        for piece in of_owner(pieces, owner):
                            start = starts[piece]
                            _copy(place[:, start : start + piece.segment.length], t[:, piece.cols])
            done.wait()
            return whole

        return pull

    def _send_home(
        self,
        group: Group,
        now: Round,
        own_keys: Keys,
        grads: tuple[Sum, Sum] | None,
        own: tuple[Sum, Sum],
    ) -> Callable[[], None]:
        rank, space, kinds = self.ring.rank, self.space, own_keys[:2]
        if grads is None:
            space.grads.own()  # it is everyone's turn
        else:
            parts = [total.final() for total in grads]
            form = form_of(kinds, parts[0].shape[1])
            packed(parts, form, into=space.grads.own()[: message_bytes(form)])
        with space.grads.published(space.stream, space.grads.written()) as done:
            for user in self._users(group.distances):
                theirs = now[user]
                form = form_of(kinds, tokens(theirs))
                message = space.grads.of(self.ranks[user])[: message_bytes(form)]
                for total, part in zip(own, opened(message, form)):
                    _add_own(total.running(), part, theirs, rank)
        return done.wait


def _room(nbytes: int) -> int:
    """With what may lie between tensors, and so that the next half starts at a whole line."""
    return -(-(nbytes + 64) // 512) * 512


def _copy(place: Tensor, t: Tensor) -> None:
    """Sample by sample: what is contiguous goes by copy engine."""
    for sample, given in zip(place, t):
        sample.copy_(given)


def _add_own(total: Tensor, part: Tensor, pieces: Pieces, owner: int) -> None:
    """Add the owner's columns of what somebody computed for all of these pieces."""
    starts = accumulate((p.segment.length for p in pieces), initial=0)
    for start, piece in zip(starts, pieces):
        if piece.owner == owner:
            total[:, piece.cols] += part[:, start : start + piece.segment.length]
