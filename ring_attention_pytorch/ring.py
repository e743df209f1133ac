"""Moving tensors among the ranks of a ring: all point-to-point code of the library.

`Ring` is who takes part; `SendRecv` is the transport of ring attention, which passes keys
from neighbour to neighbour and brings their gradients home behind them.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ring_attention_pytorch.contract import Keys
from ring_attention_pytorch.layouts import Segments, count
from ring_attention_pytorch.running import Sum

_MESSAGE_BYTES = 4096  # one fixed size, so that ranks can disagree about anything but that

_host_groups: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()


class Transfer:
    """Messages under way. It keeps what is sent alive, and untouched, until `wait`."""

    def __init__(self, sent: list[Tensor], received: list[Tensor], works: list[dist.Work]):
        self._sent, self._received, self._works = sent, received, works

    def wait(self) -> list[Tensor]:
        """What came, once everything has come and gone."""
        for work in self._works:
            work.wait()
        self._sent = []
        return self._received


class Ring:
    """Consecutive ranks of a process group, each with a place `rank` in a ring of `size`.

    A group of 8 with `size=4` is two rings, ranks 0 to 3 and 4 to 7. Nothing is cached about
    groups, so they may come and go between calls. Without a group and without an initialised
    default group the ring is this process alone. `problem` is for the next agreement.
    """

    problem: str | None = None

    def __init__(self, group: ProcessGroup | DeviceMesh | None = None, size: int | None = None):
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(
                    f"group must be a DeviceMesh of one dimension, got {group.ndim}; "
                    'pick one, as in mesh["cp"]'
                )
            group = group.get_group()
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        place, total = (
            (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        )
        if place < 0:
            raise ValueError(
                "this process is no member of the group that it gave; call this on members only"
            )
        if group is None:
            _warn_of_missing_group()
        if total == 1:
            size = None  # alone, a ring of any size is this process
        self.group = group
        self.size = total if size is None else size
        if self.size < 1 or total % self.size != 0:
            # told to all ranks when they next agree; raising here would leave the others waiting
            self.problem = f"ring_size must divide the group's {total} ranks, got {size}"
            self.size = total
        self.rank, self.first = place % self.size, place - place % self.size

    @classmethod
    def alone(cls) -> "Ring":
        """The ring of this process only, whatever groups there are."""
        ring = cls.__new__(cls)
        ring.group, ring.size, ring.rank, ring.first = None, 1, 0, 0
        return ring

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Transfer:
        """Send each tensor to its rank, and receive from each rank into its buffer.

        Between two ranks messages match in the order given. Tensors must be contiguous.
        """
        sends, receives = ([(self._global(r), t) for r, t in ops] for ops in (sends, receives))
        ops = [dist.P2POp(dist.isend, t, rank, self.group) for rank, t in sends]
        ops += [dist.P2POp(dist.irecv, t, rank, self.group) for rank, t in receives]
        works = dist.batch_isend_irecv(ops) if ops else []
        return Transfer([t for _, t in sends], [t for _, t in receives], works)

    def gather_long(self, message: bytes) -> list[bytes]:
        """The same for messages of any length, which all ranks tell one another first."""
        longest = max(map(int, self.gather_bytes(str(len(message)).encode())))
        return self.gather_bytes(message, longest)

    def gather_bytes(self, message: bytes, size: int = _MESSAGE_BYTES) -> list[bytes]:
        """The message of every rank of the group, over the host: no GPU waits."""
        if self.group is None:
            return [message]
        assert len(message) <= size, "an agreement's message must be short"
        mine = torch.frombuffer(bytearray(message.ljust(size)), dtype=torch.uint8)
        all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(all_of_them, mine, group=_host_group(self.group))
        return [bytes(t.numpy()).rstrip() for t in all_of_them]

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, self.first + rank)


Group = ProcessGroup | DeviceMesh | Ring | None


def as_ring(group: Group, size: int | None = None) -> Ring:
    """The ring of a group's ranks, or of consecutive `size` of them."""
    if not isinstance(group, Ring):
        return Ring(group, size)
    if size not in (None, group.size):
        raise ValueError(f"ring_size={size} was given beside a ring of {group.size}")
    return group


def _warn_of_missing_group() -> None:
    if dist.is_available() and dist.is_torchelastic_launched() and os.environ["WORLD_SIZE"] != "1":
        warnings.warn(
            "torchrun started several processes, but there is no process group, so each works "
            "alone: call torch.distributed.init_process_group() first",
            stacklevel=3,
        )


def _host_group(group: ProcessGroup) -> ProcessGroup:
    """A group of the same ranks that moves CPU tensors: the group itself, or a gloo companion."""
    if "cpu:" in str(dist.get_backend_config(group)):
        return group
    if group not in _host_groups:
        ranks = dist.get_process_group_ranks(group)
        _host_groups[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _host_groups[group]


@dataclass(frozen=True)
class SendRecv:
    """The ring transport: one neighbour at a time, the next hop under way while one computes.

    `segments` are every rank's keys; `distances` say which owners any rank needs, 0 first.
    Everyone passes the same distances in the same order, so there are no tags, no barriers
    and no decision around a message that depends on the rank.
    """

    ring: Ring
    segments: tuple[Segments, ...]
    distances: tuple[int, ...]

    def stream(self, keys: Keys) -> Iterator[Keys]:
        """Own keys, then those of each needed distance."""
        for here, there in pairwise(self.distances):
            coming = self._pass([t for t in keys[:3] if t is not None], here, there)
            yield keys
            k, v, *mask = coming.wait()
            keys = Keys(k, v, mask[0] if mask else None, self.segments[self._owner(there)])
        yield keys

    def stream_back(
        self, own_keys: Keys, own: tuple[Sum, Sum]
    ) -> Iterator[tuple[Keys, tuple[Sum, Sum]]]:
        """The same, each with (dk, dv) to add to, `own` being those of own keys.

        Gradients travel one hop behind the keys that they belong to, and one jump home from
        the last; after that, when the stream ends, `own` has what every rank added.
        """
        grads, travelling = own, None
        ends = [*self.distances[1:], self.ring.size]
        for here, there, keys in zip(self.distances, ends, self.stream(own_keys)):
            if here != 0:
                grads = Sum(keys.k), Sum(keys.v)
            yield keys, grads
            if here != 0:
                if travelling is not None:
                    _add(grads, travelling.wait())
                travelling = self._pass([total.running() for total in grads], here, there)
        if travelling is not None:
            _add(own, travelling.wait())

    def _pass(self, tensors: Sequence[Tensor], here: int, there: int) -> Transfer:
        """What belongs to the owner at distance `here` goes to the rank for which it is `there`."""
        ring = self.ring
        target, source = ((ring.rank + step) % ring.size for step in (there - here, here - there))
        length = count(self.segments[self._owner(there)])
        sent = [t.contiguous() for t in tensors]
        received = [t.new_empty((t.shape[0], length, *t.shape[2:])) for t in sent]
        return ring.exchange([(target, t) for t in sent], [(source, t) for t in received])

    def _owner(self, distance: int) -> int:
        return (self.ring.rank - distance) % self.ring.size


def _add(totals: Sequence[Sum], parts: Sequence[Tensor]) -> None:
    for total, part in zip(totals, parts):
        total.add(slice(0, part.shape[1]), part)
