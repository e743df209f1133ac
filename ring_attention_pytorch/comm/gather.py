"""A transport that fetches all required keys in one exchange, straight from their owners.

They arrive while the rank computes on its own block. In memory they are joined, usually in the
order of positions, so that few large tiles cover them. In backward each rank sends the gradients of
an owner's keys to it, in the inputs' dtype (float16 as float32). The owner sums them in the
accumulator's dtype, always in the same order. A fabric carries keys and gradients.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ring_attention_pytorch.comm.fabric import Channel, KVGrads
from ring_attention_pytorch.comm.fabric_messages import Messages
from ring_attention_pytorch.comm.scheduled_transport import ScheduledTransport
from ring_attention_pytorch.geometry.segments import Segments
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.schedule import steps
from ring_attention_pytorch.schedule.pieces import Workload, rounds_of
from ring_attention_pytorch.schedule.steps import KEYS, Block, Part, Program


class LocalChunks(NamedTuple):
    """The positions of keys on one rank: of each block of a program, and of each part."""

    blocks: list[Segments]
    parts: dict[Part, tuple[slice, Segments]]  # tokens of the block, and their positions

    @classmethod
    def of(cls, program: Program, rank: int) -> "LocalChunks":
        blocks = [program.held(block, rank) for block in range(len(program.blocks))]
        parts = {}
        for part in program.parts:
            span = program.spans(part.block, rank)[part.stage]
            parts[part] = span, program.segments(part, rank)
        return cls(blocks, parts)


class GatherCall:
    """One call of a gather: the keys on this rank, and sums of their gradients."""

    def __init__(
        self, gather: "Gather", program: Program, own: KVBlock, totals: KVGrads | None
    ) -> None:
        back = totals is not None
        if back not in gather.known:
            gather.known[back] = LocalChunks.of(program, gather.fabric.ring.rank)
        self.program: Program = program
        self.totals: KVGrads | Any = totals  # None is forward
        self.held: LocalChunks = gather.known[back]
        self.channel: Channel = gather.fabric.channel_type(gather.fabric, program, own, totals)
        self.blocks: dict[int, KVBlock] = {0: own}
        self.sums: dict[int, KVGrads] = {}  # by block

    def start(self, number: int) -> None:
        transfer = self.program.transfers[number]
        if transfer.kind == KEYS:
            self.channel.put(transfer)
        else:
            self.channel.give(transfer, self.sums.pop(transfer.source))
            del self.blocks[transfer.source]

    def wait(self, number: int) -> None:
        transfer = self.program.transfers[number]
        if transfer.kind == KEYS:
            k, v, *mask = self.channel.take(transfer)
            segments = self.held.blocks[transfer.block]
            self.blocks[transfer.block] = KVBlock(k, v, mask[0] if mask else None, segments)
        else:
            self.channel.reduce(transfer)

    def keys(self, part: Part) -> KVBlock:
        keys, (span, segments) = self.blocks[part.block], self.held.parts[part]
        if span == slice(0, keys.k.shape[1]):
            return keys
        mask = None if keys.key_mask is None else keys.key_mask[:, span]
        return keys._replace(k=keys.k[:, span], v=keys.v[:, span], key_mask=mask, segments=segments)

    def grads(self, part: Part, keys: KVBlock) -> KVGrads:
        if len(self.program.blocks) == 1:
            return self.totals
        if part.block == 0:
            self.sums[0] = GradAccumulator(keys.k), GradAccumulator(keys.v)
        else:
            self.sums[part.block] = self.channel.grad_accumulators(keys)
        return self.sums[part.block]

    def computed(self, part: Part) -> None:
        blocks, back = self.program.blocks, self.totals is not None
        if back and part.block == 0 and len(blocks) > 1:
            for total, own_part in zip(self.totals, self.sums.pop(0)):
                own_part.move_to(total)
                if len(blocks) > 2:
                    total.begin_update()  # otherwise each round's gradients would wait to be added
        is_last_stage = part.stage == len(blocks[part.block].stages) - 1
        if part.block and not back and is_last_stage:  # backward it is freed with its gradients
            del self.blocks[part.block]


@dataclass(frozen=True)
class Gather(ScheduledTransport):
    """A transport of one round of owners at a time; the next round arrives during compute.

    Forward a round arrives in stages, backward at once. Its gradients are sent while the next block
    computes. If nothing overlaps, own keys may be in one block with the others.
    """

    call_type = GatherCall

    # by direction: True is backward
    known: dict[bool, LocalChunks] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def make(cls, ring: Ring, blocks: Workload, at_once: int) -> "Gather":
        """Make one by messages, with rounds of `at_once` owners."""
        schedule = steps.gather(blocks, [*map(Block.of, rounds_of(blocks, at_once))])
        return cls(schedule, Messages(ring, idle=not schedule.forward.transfers))

    @property
    def keeps(self) -> bool:
        """True if keys stay: a round's keys are freed when the next but one arrives.

        False, too, on one stream, where nothing can overlap a call.
        """
        return len(self.schedule.forward.blocks) == 2 and not self.fabric.taped
