"""Moving tensors among the ranks of a ring: who takes part, and all point-to-point code."""

import ctypes
import os
import warnings
from collections.abc import Sequence
from functools import cached_property
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ring_attention_pytorch.notes import exchange


class Steps:
    """What the ranks of a ring have done together so far: who is out of step has other numbers.

    Messages between two ranks match by these, where the backend compares tags (gloo does, NCCL
    does not): what belongs to a call that a rank has skipped, or made by another plan, is never
    taken for what belongs to its next one. All rings of a group compare notes together, and count
    on from there.
    """

    def __init__(self, met: list[int] | None = None) -> None:
        self._met = [0] if met is None else met  # how often notes were compared, one for a group
        self._since = self.calls = self.messages = 0
        self.about: tuple[int, str] = (0, "")  # which plan, and what it is used for

    @property
    def notes(self) -> int:
        """How often the group has compared notes."""
        return self._met[0]

    @notes.setter
    def notes(self, number: int) -> None:
        self._met[0] = number

    def call(self, plan: int, what: str) -> None:
        """Begin another call by the plan of that number."""
        self._count_on()
        self.calls, self.messages, self.about = self.calls + 1, 0, (plan, what)

    def tag(self) -> int:
        """Of the next messages, positive and of 31 bits."""
        self._count_on()
        self.messages += 1
        return crc32(repr((self.notes, self.calls, self.messages, self.about)).encode()) >> 1

    def _count_on(self) -> None:
        if self._since != self.notes:
            self._since, self.calls, self.messages = self.notes, 0, 0


_met: WeakKeyDictionary[ProcessGroup, list[int]] = WeakKeyDictionary()
_steps: WeakKeyDictionary[ProcessGroup, dict[tuple[int, int], Steps]] = WeakKeyDictionary()
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

    A group of 8 with `size=4` is two rings, ranks 0 to 3 and 4 to 7. Groups may come and go between
    calls; one that moves no CPU tensors gets a companion that does, which lasts until
    `torch.distributed.destroy_process_group()`. Without a group and without an initialised default
    group the ring is this process alone. `problem` is for the next agreement.
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

    @cached_property
    def steps(self) -> Steps:
        """Those of these ranks, whichever object stands for them."""
        if self.group is None:
            return Steps()
        met, each = _met.setdefault(self.group, [0]), _steps.setdefault(self.group, {})
        return each.setdefault((self.first, self.size), Steps(met))

    @classmethod
    def alone(cls) -> "Ring":
        """The ring of this process only, whatever groups there are."""
        ring = cls.__new__(cls)
        ring.group, ring.size, ring.rank, ring.first = None, 1, 0, 0
        return ring

    @property
    def several(self) -> bool:
        """Whether the group has other rings beside this one."""
        return self.group is not None and self.size < dist.get_world_size(self.group)

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Transfer:
        """Send each tensor to its rank, and receive from each rank into its buffer.

        Between two ranks messages match in the order given. Tensors must be contiguous.
        """
        sends, receives = ([(self._global(r), t) for r, t in ops] for ops in (sends, receives))
        tag = self.steps.tag()
        ops = [dist.P2POp(dist.isend, t, rank, self.group, tag) for rank, t in sends]
        ops += [dist.P2POp(dist.irecv, t, rank, self.group, tag) for rank, t in receives]
        works = dist.batch_isend_irecv(ops) if ops else []
        return Transfer([t for _, t in sends], [t for _, t in receives], works)

    def gather_notes(self, subject: str, note: bytes) -> list[bytes]:
        """The note of every rank of the group, over the host: no GPU waits.

        Raises:
            ValueError: ranks have different subjects; the same text on all ranks.
        """
        self.steps.notes += 1
        return exchange(self.gather_bytes, subject, note)

    def gather_bytes(self, message: bytes, size: int) -> list[bytes]:
        """The message of every rank of the group, filled up to that size with zeros."""
        if self.group is None:
            return [message]
        mine = torch.frombuffer(bytearray(message.ljust(size, b"\0")), dtype=torch.uint8)
        all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(all_of_them, mine, group=_host_group(self.group))
        return [ctypes.string_at(t.data_ptr(), size) for t in all_of_them]

    def shared(self) -> tuple[ProcessGroup, tuple[int, ...]] | None:
        """A group all of whose ranks do the same at the same time, and this ring's among them."""
        if self.group is None or self.several:
            return None
        return self.group, tuple(range(self.size))

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, self.first + rank)


class Places(Ring):
    """Some places of a ring as a ring of their own, whose messages go by way of the whole."""

    def __init__(self, whole: Ring, places: Sequence[int]):
        self.whole, self.places, self.group = whole, tuple(places), None
        self.size, self.rank, self.first = len(self.places), self.places.index(whole.rank), 0

    @property
    def steps(self) -> Steps:
        return self.whole.steps

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Transfer:
        sends, receives = ([(self.places[r], t) for r, t in ops] for ops in (sends, receives))
        return self.whole.exchange(sends, receives)

    def shared(self) -> tuple[ProcessGroup, tuple[int, ...]] | None:
        found = self.whole.shared()
        return None if found is None else (found[0], tuple(found[1][p] for p in self.places))

    def gather_bytes(self, message: bytes, size: int) -> list[bytes]:
        raise NotImplementedError("the whole ring agrees, not a part of it")


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
