"""Figures of a plan's last observed call: bytes received, waits, and seconds of each hop."""

from collections.abc import Mapping
from typing import NamedTuple

from ring_attention_pytorch.runtime.observe import COMPUTE, WAIT, Record
from ring_attention_pytorch.schedule.steps import KEYS, Transfer


class Hop(NamedTuple):
    """Figures of one block of keys: own ones are hop 0.

    Attributes:
        owners: ranks whose keys these are.
        received: bytes of their keys and values that were received.
        waited: seconds of waiting for them.
        computed: seconds of attention to them.
    """

    number: int
    owners: tuple[int, ...]
    received: int
    waited: float
    computed: float


class Direction(NamedTuple):
    """Figures of a call forward, or backward.

    Attributes:
        seconds: from its beginning to its end.
        hops: the hops with a computation, in the order of their first one.
        gradients_received: bytes of gradients received, of own keys and of keys passed on.
        gradients_waited: seconds of waiting for them.
    """

    seconds: float
    hops: tuple[Hop, ...]
    gradients_received: int = 0
    gradients_waited: float = 0.0

    @property
    def received(self) -> int:
        """All bytes received."""
        return self.gradients_received + sum(hop.received for hop in self.hops)

    @property
    def waited(self) -> float:
        """All seconds of waiting."""
        return self.gradients_waited + sum(hop.waited for hop in self.hops)


class Statistics(NamedTuple):
    """Figures of the last observed call of a plan on this rank; None for a direction not called."""

    forward: Direction | None
    backward: Direction | None

    def __str__(self) -> str:
        """Return a table of text."""
        lines = []
        for name, of in zip(("forward", "backward"), self):
            if of is None:
                continue
            lines.append(f"{name}: {_ms(of.seconds)}, {of.received} bytes came")
            for hop in of.hops:
                whose = ", ".join(map(str, hop.owners))
                lines.append(
                    f"  hop {hop.number}, keys of {whose}: {hop.received} bytes, "
                    f"waited {_ms(hop.waited)}, computed {_ms(hop.computed)}"
                )
            if of.gradients_received or of.gradients_waited:
                came, waited = of.gradients_received, _ms(of.gradients_waited)
                lines.append(f"  gradients: {came} bytes, waited {waited}")
        return "\n".join(lines)


def statistics_of(records: Mapping[str, Record]) -> Statistics:
    """Return the figures of recorded calls.

    Raises:
        ValueError: nothing was recorded.
    """
    if not records:
        raise ValueError(
            "plan.statistics: no call of this plan was observed; make one inside "
            "`with observe():`, with plan=plan"
        )
    found = {name: _direction(record) for name, record in records.items()}
    return Statistics(found.get("forward"), found.get("backward"))


def _direction(record: Record) -> Direction:
    """Sum up the spans of a direction."""
    program, parts = record.program, record.program.parts
    computed = dict.fromkeys((part.block for part in parts), 0.0)
    waited: dict[int, float] = {}
    gradients_waited = 0.0
    for what, number, start, stop in record.spans:
        seconds = record.seconds(start, stop)
        if what == COMPUTE:
            computed[parts[number].block] += seconds
        elif what == WAIT and program.transfers[number].kind == KEYS:
            block = program.transfers[number].block
            waited[block] = waited.get(block, 0.0) + seconds
        elif what == WAIT:
            gradients_waited += seconds
    keys = dict.fromkeys(computed, 0)
    grads = 0
    for transfer in program.transfers:
        if transfer.kind == KEYS:
            keys[transfer.block] += _bytes(record, transfer)
        else:
            grads += _bytes(record, transfer)
    hops = [
        Hop(block, record.owners(block), keys[block], waited.get(block, 0.0), seconds)
        for block, seconds in computed.items()
    ]
    whole = record.seconds(record.start, record.stop)
    return Direction(whole, tuple(hops), grads, gradients_waited)


def _bytes(record: Record, transfer: Transfer) -> int:
    copies = record.program.copies(transfer, record.place)
    tokens = sum(copy.length for copy in copies if copy.peer != record.place)
    return tokens * transfer.token_bytes(record.shape)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
