"""A fabric for several machines: keys cross to a machine once, gradients come as sums.

    put(1)   keys of own machine start, keys of the next machine start to cross    while own keys
    take(1)                                                                        are computed on
    put(2)   keys that crossed are passed on, keys of another machine start to cross
    take(2)                                                     while own machine's are computed on

`schedule/relays.py` decides, as ints, the messages. Backward a relay adds its machine's gradients
in the accumulator's dtype, in the order of ranks, and rounds the sum once. An owner adds its own
machine's gradients in the order of ranks, then the sums of the others by the machines' distance. So
results do not depend on the order of arrival. Each transfer is two exchanges, on every rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.comm.fabric import KVGrads
from ring_attention_pytorch.comm.fabric_messages import MessageChannel, Messages, Pack
from ring_attention_pytorch.comm.messages import Form
from ring_attention_pytorch.ranks.ring import Exchange, Ring
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.runtime.rowwise import wire_dtype
from ring_attention_pytorch.schedule.relays import Leg, Machines, Route, members
from ring_attention_pytorch.schedule.steps import GRADS, KEYS, Program, Transfer

Tensors = Sequence[Tensor]


class Sums(NamedTuple):
    """Gradients on their way: the exchange within machines, then the one that crosses."""

    given: list[Tensor]  # own partial gradients of the block
    exchange: Exchange
    direct: list[tuple[slice, Tensors]]  # of own keys, by ranks of this machine


class RelayChannel(MessageChannel):
    """One call by way of relays."""

    def __init__(
        self, fabric: "Relays", program: Program, own: KVBlock, totals: KVGrads | None
    ) -> None:
        super().__init__(fabric, program, own, totals)
        self.relays: Relays = fabric
        self.ring: Ring = fabric.ring
        self.coming: list[Transfer] = [t for t in program.transfers if t.kind == KEYS]
        self.going: list[Transfer] = [t for t in program.transfers if t.kind == GRADS]
        self.crossing: dict[Transfer, Exchange] = {}
        self.arrived: dict[Transfer, dict[int, list[Tensor]]] = {}  # first legs, by sender
        self.passing: dict[Transfer, Exchange] = {}
        self.sums: dict[Transfer, Sums] = {}
        self.returning: dict[Transfer, Sums] = {}

    # --- keys ---

    def put(self, transfer: Transfer) -> None:
        if transfer in self.crossing:  # since the last transfer
            self._pass_on(transfer)
        else:
            self._cross(transfer)
        following = self.coming.index(transfer) + 1
        for ahead in self.coming[following : following + 1]:
            self._cross(ahead)

    def take(self, transfer: Transfer) -> list[Tensor]:
        if transfer not in self.passing:
            self._pass_on(transfer)
        route = self._route(transfer)
        messages = self.passing.pop(transfer).wait()
        tensors = [self.arrived.pop(transfer), self._opened(route.receives[1], messages)]
        if not route.chunks:
            return [t[:, :0] for t in self._own_keys]
        in_order = []
        for (leg, sender, at), _ in route.chunks:
            in_order.append([t[:, at] for t in tensors[leg][sender]])
        return [_joined(parts) for parts in zip(*in_order)]

    def _cross(self, transfer: Transfer) -> None:
        """Send own keys to their relays, and to ranks of this machine."""
        route, packed = self._route(transfer), dict[tuple[tuple[int, int], ...], Tensor]()
        sends = []
        for leg in route.sends[0]:
            spans = [span.cols for span in leg.spans]
            known = tuple((span.start, span.stop) for span in leg.spans)
            if known not in packed:
                pack = Pack(self._form(leg), spans)
                packed[known] = pack.packed(self._own_keys)
            sends.append((leg.receiver, packed[known]))
        self.crossing[transfer] = self.ring.exchange(sends, self._rooms(route.receives[0]))

    def _pass_on(self, transfer: Transfer) -> None:
        """Wait for the keys that crossed, and send them on to ranks of this machine."""
        route = self._route(transfer)
        messages = self.crossing.pop(transfer).wait()
        arrived = self.arrived[transfer] = self._opened(route.receives[0], messages)
        by_sender = {leg.sender: leg for leg in route.receives[0]}
        sends = []
        for leg in route.sends[1]:
            parts = []
            for span in leg.spans:
                at = by_sender[span.owner].find(span)
                parts.append([t[:, at] for t in arrived[span.owner]])
            form = self._form(leg)
            whole = [_joined(each) for each in zip(*parts)]
            sends.append((leg.receiver, form.pack(whole, form.empty(self.own.k.device))))
        self.passing[transfer] = self.ring.exchange(sends, self._rooms(route.receives[1]))

    # --- gradients ---

    def give(self, transfer: Transfer, grads: KVGrads) -> None:
        """Send gradients to relays of this machine, and to owners on it."""
        route, given = self._route(transfer), [total.finalize() for total in grads]
        sends, receives = [], []
        for number, legs in enumerate(route.receives):
            for leg in legs:
                if number or self._is_near(leg.sender):
                    sends.append((leg.sender, self._packed(route, number, leg, given)))
        for number, legs in enumerate(route.sends):
            near = [leg for leg in legs if number or self._is_near(leg.receiver)]
            receives += self._rooms(near, back=True)
        self.sums[transfer] = Sums(given, self.ring.exchange(sends, receives), [])

    def reduce(self, transfer: Transfer) -> None:
        """Let sums of this machine cross, and add those that have crossed since the last one."""
        self._send_sums(transfer)
        last = transfer == self.going[-1]
        for done in [each for each in self.returning if last or each != transfer]:
            self._add(done)

    def _send_sums(self, transfer: Transfer) -> None:
        """Sum this machine's gradients of others' keys, and send them to their owners."""
        route, sums = self._route(transfer), self.sums.pop(transfer)
        near = [leg for leg in route.sends[0] if self._is_near(leg.receiver)]
        messages = sums.exchange.wait()
        direct = self._opened(near, messages[: len(near)], back=True)
        passed = self._opened(route.sends[1], messages[len(near) :], back=True)
        for leg in near:
            sums.direct.extend(self._parts(leg, direct[leg.receiver]))
        sends = []
        for leg in route.receives[0]:
            if not self._is_near(leg.sender):
                whole = self._summed(route, leg, sums.given, passed)
                form = self._form(leg, back=True)
                sends.append((leg.sender, form.pack(whole, form.empty(self.own.k.device))))
        rooms = self._rooms(self._far(route), back=True)
        self.returning[transfer] = sums._replace(exchange=self.ring.exchange(sends, rooms))

    def _summed(
        self, route: Route, leg: Leg, given: Tensors, passed: dict[int, list[Tensor]]
    ) -> list[Tensor]:
        """Return the sums of this machine's gradients of a leg's keys, in the order of ranks."""
        totals = []
        for like in self.own[:2]:
            shape = like.shape[0], leg.tokens, *like.shape[2:]
            totals.append(GradAccumulator(like.new_empty(shape), dtype=wire_dtype(like.dtype)))
        from_rank = {each.receiver: each for each in route.sends[1]}
        for rank in members(self.relays.machines, self.relays.machines[self.ring.rank]):
            parts: list[tuple[slice, Tensors]] = []
            if rank == self.ring.rank:
                for (number, sender, at), here in route.chunks:
                    if (number, sender) == (0, leg.sender):
                        parts.append((at, [t[:, here] for t in given]))
            elif rank in from_rank:
                for span in from_rank[rank].spans:
                    if span.owner == leg.sender:
                        at = from_rank[rank].find(span)
                        parts.append((leg.find(span), [t[:, at] for t in passed[rank]]))
            for number, total in enumerate(totals):
                total.add_all((at, both[number]) for at, both in parts)
        return [total.finalize() for total in totals]

    def _add(self, transfer: Transfer) -> None:
        """Add all that has come home of a transfer, in a fixed order."""
        sums, far = self.returning.pop(transfer), self._far(self._route(transfer))
        tensors = self._opened(far, sums.exchange.wait(), back=True)
        parts = [*sums.direct]
        for leg in far:
            parts += self._parts(leg, tensors[leg.receiver])
        for number, total in enumerate(self.totals or ()):
            total.add_all((here, both[number]) for here, both in parts)

    def _far(self, route: Route) -> list[Leg]:
        """List the first legs from here to other machines, by the machines' distance."""
        machines = self.relays.machines
        mine, number = machines[self.ring.rank], 1 + max(machines)
        far = [leg for leg in route.sends[0] if not self._is_near(leg.receiver)]
        return sorted(far, key=lambda leg: (machines[leg.receiver] - mine) % number)

    def _packed(self, route: Route, number: int, leg: Leg, given: Tensors) -> Tensor:
        """Pack own gradients of the keys that came by a leg."""
        places = [
            (arrived.at.start, here)
            for arrived, here in route.chunks
            if (arrived.leg, arrived.sender) == (number, leg.sender)
        ]
        spans = [here for _, here in sorted(places, key=lambda place: place[0])]
        return Pack(self._form(leg, back=True), spans).packed(given)

    # --- messages ---

    @property
    def _own_keys(self) -> list[Tensor]:
        return [t for t in self.own[:3] if t is not None]

    def _route(self, transfer: Transfer) -> Route:
        return self.relays.route(self.program, transfer)

    def _is_near(self, rank: int) -> bool:
        machines = self.relays.machines
        return machines[rank] == machines[self.ring.rank]

    def _form(self, leg: Leg, back: bool = False) -> Form:
        return (Form.of_grads if back else Form.of_keys)(self.own, leg.tokens)

    def _rooms(self, legs: Sequence[Leg], back: bool = False) -> list[tuple[int, Tensor]]:
        """Make memory for legs that come here, or for their gradients that come back."""
        device = self.own.k.device
        ends = [leg.receiver if back else leg.sender for leg in legs]
        return [(rank, self._form(leg, back).empty(device)) for rank, leg in zip(ends, legs)]

    def _opened(
        self, legs: Sequence[Leg], messages: Tensors, back: bool = False
    ) -> dict[int, list[Tensor]]:
        """Return the tensors of messages, by the rank that they come from."""
        found = {}
        for leg, message in zip(legs, messages):
            found[leg.receiver if back else leg.sender] = self._form(leg, back).open(message)
        return found

    @staticmethod
    def _parts(leg: Leg, tensors: Tensors) -> Iterator[tuple[slice, Tensors]]:
        """Yield the parts of a message about own keys, each with its slice of these."""
        for span in leg.spans:
            at = leg.find(span)
            yield span.cols, [t[:, at] for t in tensors]


@dataclass(frozen=True)
class Relays(Messages):
    """A fabric of messages by way of relays; `machines` numbers the ranks' machines."""

    channel_type = RelayChannel  # type: ignore[assignment]

    machines: Machines = ()
    routes: dict[Transfer, Route] = field(default_factory=dict, compare=False, repr=False)

    return_path = ", summed by relays"

    def route(self, program: Program, transfer: Transfer) -> Route:
        """Return this rank's messages of a transfer, of keys or back. Cached."""
        if transfer not in self.routes:
            self.routes[transfer] = self._made(program, transfer)
        return self.routes[transfer]

    def _made(self, program: Program, transfer: Transfer) -> Route:
        pieces = [program.chunks(transfer.fetched, rank) for rank in range(self.ring.size)]
        return Route.of(pieces, self.machines, self.ring.rank)


def _joined(parts: Tensors) -> Tensor:
    """Join tensors along their tokens; one is returned as it is."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts], dim=1)
