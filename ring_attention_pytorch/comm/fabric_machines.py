"""A fabric for several machines whose ranks share memory: messages across, copy engines inside.

Keys cross as in `fabric_relays.py`. A relay writes what has crossed to its slot of the memory that
its machine shares, where the others copy it from while kernels compute. They leave gradients there,
and the relay sums these where they lie. `schedule/held_keys.py` decides the places, as ints.

    put(1)   own keys are published, keys of the next machine start to cross
    take(1)  copies of this machine's keys
    put(2)   what has crossed is published, keys of another machine start to cross
    take(2)  copies of it
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ring_attention_pytorch.comm.fabric import KVGrads
from ring_attention_pytorch.comm.fabric_copies import CopyChannel, CopyEngines
from ring_attention_pytorch.comm.fabric_relays import RelayChannel, Relays, Sums, Tensors
from ring_attention_pytorch.comm.fabric_shared import apart
from ring_attention_pytorch.comm.symmetric_memory import PeerGroup
from ring_attention_pytorch.ranks.ring import Ring, SubRing
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.schedule.held_keys import Held, Inside, inside
from ring_attention_pytorch.schedule.relays import Machines, Route, members
from ring_attention_pytorch.schedule.steps import Program, Transfer


@dataclass(frozen=True)
class Holders(CopyEngines):
    """Copies inside a machine, out of the slots of the ranks that hold keys, for one program."""

    held: tuple[Held, ...] = ()

    def lengths(self, program: Program, block: int) -> Sequence[int]:
        return self.held[block - 1].lengths


class HolderChannel(CopyChannel):
    """One call inside a machine; `arrived` has tensors from other machines, of the next round."""

    def __init__(
        self, fabric: Holders, program: Program, own: KVBlock, totals: KVGrads | None
    ) -> None:
        super().__init__(fabric, program, own, totals)
        self.held: tuple[Held, ...] = fabric.held
        self.block: int = 0  # whose keys are written
        self.arrived: Mapping[int, Tensors] = {}  # by sender

    def hold(self, transfer: Transfer, arrived: Mapping[int, Tensors]) -> None:
        """Write own keys, or those that have arrived, to this rank's slot, and publish it."""
        self.block, self.arrived = transfer.block, arrived
        self.put(transfer)
        self.arrived = {}

    def _written(self) -> list[Tensor]:
        held, me = self.held[self.block - 1], self.fabric.ring.rank
        if not held.relayed:
            return super()._written()
        form = self.fabric.form(self.own, held.lengths[me], masks=True)
        places = self.space.keys.write_view(form)
        for leg, holder, at in held.arrived:
            if holder == me:
                rooms = *apart(places[0], self.own), *places[1:]
                for room, t in zip(rooms, self.arrived[leg.sender]):
                    room[:, at].copy_(t)
        return places

    def sums(self, transfer: Transfer) -> list[tuple[slice, Tensors]]:
        """Return this machine's gradients of the keys in this rank's slot, summed."""
        arriving, end = self.home.pop(transfer)
        self.space.grads.join(end)
        return [(here, apart(out, self.own)) for here, out in arriving]


def holders(
    ring: Ring, machines: Machines, shared: PeerGroup, program: Program
) -> tuple[Holders, Program]:
    """Return the copies inside this rank's machine, and their program."""
    machine = machines[ring.rank]
    there = members(machines, machine)
    part = Inside.of(program, machines, machine)
    ranks = tuple(shared.ranks[rank] for rank in there)
    near = SubRing(ring, there)
    return Holders(near, shared.space, ranks, by_copy_engine=True, held=part.held), part.program


class MachineChannel(RelayChannel):
    """One call by way of relays that share memory with their machine."""

    def __init__(
        self, fabric: "MachineMemory", program: Program, own: KVBlock, totals: KVGrads | None
    ) -> None:
        super().__init__(fabric, program, own, totals)
        copies, part = fabric.inside(program, totals is not None)
        self.near: HolderChannel = HolderChannel(copies, part, own, totals)
        self.held: tuple[Held, ...] = self.near.held

    def put(self, transfer: Transfer) -> None:
        super().put(transfer)
        if transfer in self.crossing and not self.held[transfer.block - 1].relayed:
            self._pass_on(transfer)  # own keys are here

    def take(self, transfer: Transfer) -> list[Tensor]:
        if transfer in self.crossing:
            self._pass_on(transfer)
        return self.near.take(self._inside(transfer))

    def _pass_on(self, transfer: Transfer) -> None:
        """Wait for the keys that cross, and publish them, or own keys, on this machine."""
        messages = self.crossing.pop(transfer).wait()
        arrived = self._opened(self._route(transfer).receives[0], messages)
        self.near.hold(self._inside(transfer), arrived)

    def grad_accumulators(self, keys: KVBlock) -> KVGrads:
        return self.near.grad_accumulators(keys)

    def give(self, transfer: Transfer, grads: KVGrads) -> None:
        """Publish gradients on this machine, and launch the sums of all that this rank holds."""
        self.near.give(self._inside(transfer), grads)

    def _send_sums(self, transfer: Transfer) -> None:
        """Send the sums of others' keys to their owners; sums of own keys stay."""
        held, me = self.held[transfer.source - 1], self.near.fabric.ring.rank
        sums, sends = self.near.sums(self._inside(transfer)), []
        for leg, holder, at in held.arrived:
            if holder == me:
                form = self._form(leg, back=True)
                message = form.empty(self.own.k.device)
                _fill(form.open(message), at, sums)
                sends.append((leg.sender, message))
        rooms = self._rooms(self._far(self._route(transfer)), back=True)
        direct = [] if held.relayed else sums
        self.returning[transfer] = Sums([], self.ring.exchange(sends, rooms), direct)

    def _inside(self, transfer: Transfer) -> Transfer:
        return inside(transfer, self.near.fabric.ring.size)


@dataclass(frozen=True)
class MachineMemory(Relays):
    """A fabric of messages between machines, and of the memory `shared` inside this one."""

    channel_type = MachineChannel  # type: ignore[assignment]

    shared: PeerGroup | Any = None
    directions: dict[bool, tuple[Holders, Program]] = field(
        default_factory=dict, compare=False, repr=False
    )  # if back

    name = "the memory of each machine, to which relays write the others' keys"

    def drain(self) -> None:
        self.shared.space.wait_copies()

    def inside(self, program: Program, back: bool) -> tuple[Holders, Program]:
        """Return the copies of a program on this machine, and its part there. Cached."""
        if back not in self.directions:
            self.directions[back] = holders(self.ring, self.machines, self.shared, program)
        return self.directions[back]

    def _made(self, program: Program, transfer: Transfer) -> Route:
        """Return this rank's messages of a transfer: those that cross."""
        sends, receives, _ = super()._made(program, transfer)
        machines = self.machines
        far = [
            tuple(leg for leg in legs if machines[leg.sender] != machines[leg.receiver])
            for legs in (sends[0], receives[0])
        ]
        return Route((far[0], ()), (far[1], ()), ())


def _fill(rooms: Tensors, at: slice, sums: Sequence[tuple[slice, Tensors]]) -> None:
    """Write a message of the slot's tokens `at`: all sums of these, each with its own tokens."""
    for here, parts in sums:
        first, last = max(here.start, at.start), min(here.stop, at.stop)
        if first < last:
            for room, part in zip(rooms, parts):
                some = part[:, first - here.start : last - here.start]
                room[:, first - at.start : last - at.start].copy_(some)
