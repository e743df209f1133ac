"""A chunk of a prompt over several machines: it crosses to each once, and results come back merged.

first exchange     q, k and v to ranks of the own machine, and to a relay on each other one
second exchange    the relays pass them on
for each machine   results for its queries go to their relays, who merge them by LSE and send
                   one result to the rank of the queries; the next machine's are computed then
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from ring_attention_pytorch.comm.collectives import start_messages
from ring_attention_pytorch.comm.messages import Form
from ring_attention_pytorch.inference.prefill import (
    Attend,
    Found,
    PromptChunk,
    Wait,
    form_of,
)
from ring_attention_pytorch.plan.option_types import LayoutOption
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.accumulate import OutputAccumulator
from ring_attention_pytorch.schedule.passing import passes_spare
from ring_attention_pytorch.schedule.relays import members, relay


def chunk_over(ring: Ring, layout: LayoutOption, counts: tuple[int, ...]) -> PromptChunk:
    """Return a chunk that goes by way of relays if that spares messages between machines."""
    kind = RelayedChunk if passes_spare(ring.machines) else PromptChunk
    return kind(ring, layout, counts)


class RelayedChunk(PromptChunk):
    """A sharded chunk over several machines of several ranks."""

    def results(self, queries: Sequence[Tensor], attend: Attend) -> Wait:
        machines, me = self.ring.machines, self.ring.rank
        number, mine = 1 + max(machines), machines[me]
        near = [rank for rank in members(machines, mine) if rank != me]
        waits = list[Wait]()
        cross: Callable[[], Wait] | None = None  # the second half of a machine's results' way
        for distance in range(1, number):
            owners = members(machines, (mine + distance) % number)
            found = {owner: attend(queries[owner]) for owner in owners}
            if cross is not None:
                waits.append(cross())
            cross = self._merged(found, relay(machines, (mine - distance) % number, me))
        sends = [(rank, rank, attend(queries[rank])) for rank in near]
        if cross is not None:
            waits.append(cross())
        if near:
            waits.append(self._trade(sends[0][2], sends, [(rank, me) for rank in near]))
        return lambda: [each for wait in waits for each in wait()]

    def _merged(self, found: dict[int, Found], sender: int) -> Callable[[], Wait]:
        """Send results for a machine's queries to the relays here, the first half of their way.

        Return a function for the second one: it merges them in the order of ranks, sends each to
        the rank of its queries, and starts to receive own ones from `sender`.
        """
        machines, me = self.ring.machines, self.ring.rank
        near = [rank for rank in members(machines, machines[me]) if rank != me]
        like = next(iter(found.values()))
        to = {owner: relay(machines, machines[me], owner) for owner in found}
        held = [owner for owner in found if to[owner] == me]
        sends = [(to[owner], owner, each) for owner, each in found.items() if to[owner] != me]
        wait = self._trade(like, sends, [(rank, owner) for owner in held for rank in near])

        def cross() -> Wait:
            came, sums = wait(), []
            for at, owner in enumerate(held):
                parts = dict(zip(near, came[at * len(near) :])) | {me: found[owner]}
                sums.append((owner, owner, _merge([parts[rank] for rank in sorted(parts)])))
            return self._trade(like, sums, [(sender, me)])

        return cross

    def _trade(
        self,
        like: Found,
        sends: Sequence[tuple[int, int, Found]],
        comes: Sequence[tuple[int, int]],
    ) -> Wait:
        """Send results and receive others like these, each for an owner's queries.

        `sends` has the receiver, the owner and the result, `comes` the sender and the owner. Return
        a function that waits for the results that come, in their order.
        """
        device = like[0].device
        forms = [form_of(like, self.counts[owner]) for _, owner in comes]
        rooms = [form.empty(device) for form in forms]
        packed = []
        for rank, owner, found in sends:
            form = form_of(found, self.counts[owner])
            packed.append((rank, form.pack(found, form.empty(device))))
        receives = [(rank, room) for (rank, _), room in zip(comes, rooms)]
        transfer = start_messages(self.ring, packed, receives)

        def wait() -> list[Found]:
            transfer.wait()
            return [_opened(form, room) for form, room in zip(forms, rooms)]

        return wait


def _opened(form: Form, room: Tensor) -> Found:
    out, lse = form.open(room)
    return out, lse


def _merge(parts: Sequence[Found]) -> Found:
    """Merge results for the same queries by LSE, in their order."""
    out = parts[0][0]
    result = OutputAccumulator(out, out.shape[-1])
    for part in parts:
        result.add(slice(0, out.shape[1]), *part)
    return result.finalize()
