"""Bars of a step: what a rank computes and what is under way to it, as the cost model times it."""

from typing import NamedTuple

from ring_attention_pytorch.schedule.cost import Clock, walked
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
    """Return the bars of a rank, as the cost model times them."""
    computed, under_way = [], []
    for what, start, stop in walked(program, Clock.of(program, rank, shape, machine, back)):
        if isinstance(what, Part):
            computed.append(Bar(start, stop, *of_part(program, what)))
        else:
            under_way.append(Bar(start, stop, *of_transfer(program, what)))
    return Timeline(computed, under_way)


def of_part(program: Program, part: Part) -> tuple[str, str]:
    """Return the kind of a part, and how far behind the rank the owners of its keys are."""
    block = program.blocks[part.block]
    if not part.block:
        return OWN, "own"
    stage = block.stages[part.stage]
    distances = sorted(distance for group in stage for distance in group)
    words = " ".join("own" if distance == 0 else f"-{distance}" for distance in distances)
    return ALL if 0 in block.distances else OTHERS, words


def of_transfer(program: Program, transfer: Transfer) -> tuple[str, str]:
    """Return the kind of a transfer, and whose keys come, or to whose gradients are added."""
    if transfer.kind == KEYS:
        return KEYS_COME, of_part(program, Part(transfer.block, transfer.stage))[1]
    return GRADS_GO, of_part(program, Part(transfer.block))[1] if transfer.block else "own"
