"""Bars of a step: a rank's compute and the transfers in flight to it, by the cost model."""

from typing import NamedTuple

from ring_attention_pytorch.schedule.cost import Clock, walked
from ring_attention_pytorch.schedule.hardware import Hardware
from ring_attention_pytorch.schedule.pieces import KVShape
from ring_attention_pytorch.schedule.steps import KEYS, Part, Program, Transfer

OWN, OTHERS, ALL = "computes on own keys", "on others' keys", "on all together"
KEYS_COME, GRADS_GO = "keys come", "gradients travel"


class Bar(NamedTuple):
    """Work on a stream between two times in seconds; `words` names the keys' owners."""

    start: float
    stop: float
    kind: str
    words: str


class Timeline(NamedTuple):
    """The two streams of one direction: parts computed, and transfers in flight."""

    computed: list[Bar]
    under_way: list[Bar]

    @property
    def end(self) -> float:
        """Seconds until everything is done."""
        return max(bar.stop for bar in (*self.computed, *self.under_way))


def predicted(
    program: Program, rank: int, shape: KVShape, machine: Hardware, back: bool
) -> Timeline:
    """Return the bars of a rank, as the cost model predicts them."""
    computed, under_way = [], []
    for what, start, stop in walked(program, Clock.of(program, rank, shape, machine, back)):
        if isinstance(what, Part):
            computed.append(Bar(start, stop, *of_part(program, what)))
        else:
            under_way.append(Bar(start, stop, *of_transfer(program, what)))
    return Timeline(computed, under_way)


def of_part(program: Program, part: Part) -> tuple[str, str]:
    """Return the kind of a part, and the distances of its keys' owners as text."""
    block = program.blocks[part.block]
    if not part.block:
        return OWN, "own"
    stage = block.stages[part.stage]
    distances = sorted(distance for group in stage for distance in group)
    words = " ".join("own" if distance == 0 else f"-{distance}" for distance in distances)
    return ALL if 0 in block.distances else OTHERS, words


def of_transfer(program: Program, transfer: Transfer) -> tuple[str, str]:
    """Return the kind of a transfer, and the owners of the keys or gradients as text."""
    if transfer.kind == KEYS:
        return KEYS_COME, of_part(program, Part(transfer.block, transfer.stage))[1]
    return GRADS_GO, of_part(program, Part(transfer.block))[1] if transfer.block else "own"
