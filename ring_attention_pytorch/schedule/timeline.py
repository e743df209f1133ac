"""Bars of a step: what a rank computes and what is under way to it, as the cost model times it."""

from typing import NamedTuple

from ring_attention_pytorch.schedule.cost import (
    bytes_of,
    left_for_later,
    moved,
    part_seconds,
    transfer_seconds,
)
from ring_attention_pytorch.schedule.hardware import Hardware
from ring_attention_pytorch.schedule.pieces import KVShape
from ring_attention_pytorch.schedule.steps import KEYS, Part, Program, Transfer

OWN, OTHERS, ALL = "computes on own keys", "on others' keys", "on all together"
KEYS_COME, GRADS_GO = "keys come", "gradients travel"


class Bar(NamedTuple):
    """Something that takes a stream from one second to another; words say whose keys it is of."""

    start: float
    stop: float
    kind: str
    words: str


class Timeline(NamedTuple):
    """The two streams of one direction: what is computed, and what is under way."""

    computed: list[Bar]
    under_way: list[Bar]

    @property
    def end(self) -> float:
        """Seconds until all is done."""
        return max(bar.stop for bar in (*self.computed, *self.under_way))


def predicted(
    program: Program, rank: int, shape: KVShape, machine: Hardware, back: bool
) -> Timeline:
    """Return the bars of a rank as `cost.predict` times them.

    What gives way is computed while nothing else can be, and what is left of it at the end.
    """
    a_flop = 2.5 / machine.backward if back else 1 / machine.forward
    computed, under_way = [], []
    arrived: dict[int, float] = {}
    now = link = left = last = 0.0
    aside = Bar(0.0, 0.0, OWN, "")  # what gives way
    for wait, start, part in program.steps:
        ready = max([now, *(arrived[number] for number in wait)])
        if left and ready > now:
            spent = min(left, ready - now)
            computed.append(aside._replace(start=now, stop=now + spent))
            left -= spent
        now = ready
        for number in start:
            transfer = program.transfers[number]
            ahead = 0.0 if wait or transfer.kind == KEYS else left_for_later(machine) * last
            begin = max(now - ahead, link)
            near, far = moved(program, transfer, rank, machine.domain)
            one = bytes_of(transfer, shape)
            link = begin + transfer_seconds(transfer, near * one, far * one, machine)
            arrived[number] = link
            under_way.append(Bar(begin, link, *of_transfer(program, transfer)))
        last = 0.0
        if part is None:
            continue
        seconds = last = part_seconds(program, part, rank, shape, machine, a_flop)
        bar = Bar(now, now + seconds, *of_part(program, part))
        if part.gives_way:
            aside, left, last = bar, left + seconds, 0.0
        else:
            computed.append(bar)
            now = bar.stop
    if left:
        computed.append(aside._replace(start=now, stop=now + left))
    return Timeline(computed, under_way)


def of_part(program: Program, part: Part) -> tuple[str, str]:
    """Return the kind of a part, and how far behind the rank the owners of its keys are."""
    block = program.blocks[part.block]
    if not part.block:
        return OWN, ("own", "own, rest")[part.stage]
    stage = block.stages[part.stage]
    distances = sorted(distance for group in stage for distance in group)
    words = " ".join("own" if distance == 0 else f"-{distance}" for distance in distances)
    return ALL if 0 in block.distances else OTHERS, words


def of_transfer(program: Program, transfer: Transfer) -> tuple[str, str]:
    """Return the kind of a transfer, and whose keys come, or to whose gradients are added."""
    if transfer.kind == KEYS:
        return KEYS_COME, of_part(program, Part(transfer.block, transfer.stage))[1]
    return GRADS_GO, of_part(program, Part(transfer.block))[1] if transfer.block else "own"
