"""A ring transport: keys go from neighbour to neighbour, and their gradients follow them.

Liu et al. 2023, section 3. Memory does not grow with the ring.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ring_attention_pytorch.comm.fabric import KVGrads
from ring_attention_pytorch.comm.fabric_messages import Messages
from ring_attention_pytorch.comm.messages import Form
from ring_attention_pytorch.comm.scheduled_transport import ScheduledTransport
from ring_attention_pytorch.geometry.segments import Segments, count
from ring_attention_pytorch.ranks.ring import Exchange, Ring
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.schedule import steps
from ring_attention_pytorch.schedule.pieces import Workload
from ring_attention_pytorch.schedule.steps import KEYS, Part, Program


class Blocks(NamedTuple):
    """The blocks that pass a rank in one direction: the same in each call of a plan."""

    segments: list[Segments]
    forms: list[Form]  # of messages of keys, and below of their gradients
    wide_forms: list[Form]

    @classmethod
    def of(cls, program: Program, rank: int, own: KVBlock) -> "Blocks":
        """Compute the blocks of keys that are like own ones, but of other lengths."""
        segments = [program.held(block, rank) for block in range(len(program.blocks))]
        wide = accumulation_dtype(own.k.dtype)
        forms, wide_forms = [], []
        for length in map(count, segments):
            forms.append(Form.of_keys(own, length))
            wide_forms.append(Form.of(own[:2], length, wide))
        return cls(segments, forms, wide_forms)


class _Call:
    """One call: two alternating buffers of keys, and gradients computed, sent and received."""

    def __init__(
        self, by: "SendRecv", program: Program, own: KVBlock, totals: KVGrads | None
    ) -> None:
        self.ring, self.program, self.own = by.fabric.ring, program, own
        back = totals is not None
        if back not in by.known:
            by.known[back] = Blocks.of(program, self.ring.rank, own)
        self.segments, self.forms, self.wide_forms = by.known[back]
        self.totals: dict[int, KVGrads | Any] = {0: totals}  # by block
        self.under_way: dict[int, Exchange] = {}
        if not program.transfers:
            return
        longest = max(form.nbytes for form in self.forms)
        self.held = [own.k.new_empty(longest, dtype=torch.uint8) for _ in range(2)]
        self.forms[0].pack([t for t in own[:3] if t is not None], self.held[0])
        if back:
            longest = max(form.nbytes for form in self.wide_forms)
            self.made, self.sent, self.received = (
                own.k.new_empty(longest, dtype=torch.uint8) for _ in range(3)
            )

    def start(self, number: int) -> None:
        kind, source, block, (distance,), *_ = self.program.transfers[number]
        rank, size = self.ring.rank, self.ring.size
        if kind == KEYS:
            forms, sends, receives = self.forms, self.held[source % 2], self.held[block % 2]
        else:
            for total in self.totals.pop(source):
                total.begin_update()  # the whole sum, in `made`
            forms, sends, receives = self.wide_forms, self.made, self.received
            self.made, self.sent = self.sent, self.made
        sends, receives = sends[: forms[source].nbytes], receives[: forms[block].nbytes]
        self.under_way[number] = self.ring.exchange(
            [((rank + distance) % size, sends)], [((rank - distance) % size, receives)]
        )

    def wait(self, number: int) -> None:
        self.under_way.pop(number).wait()
        kind, _, block, *_ = self.program.transfers[number]
        if kind != KEYS:
            parts = self.wide_forms[block].open(self.received)
            for total, part in zip(self.totals[block], parts):
                total.add(slice(0, part.shape[1]), part)

    def keys(self, part: Part) -> KVBlock:
        if part.block == 0:
            return self.own
        k, v, *mask = self.forms[part.block].open(self.held[part.block % 2])
        return KVBlock(k, v, mask[0] if mask else None, self.segments[part.block])

    def grads(self, part: Part, keys: KVBlock) -> KVGrads:
        if part.block:
            dk, dv = self.wide_forms[part.block].open(self.made)
            sums = GradAccumulator(keys.k, into=dk), GradAccumulator(keys.v, into=dv)
            self.totals[part.block] = sums
        return self.totals[part.block]

    def computed(self, part: Part) -> None:
        pass


@dataclass(frozen=True)
class SendRecv(ScheduledTransport):
    """A transport of one neighbour's keys at a time; the next hop is in flight during compute.

    There are no barriers. An owner's keys are one message, forwarded unchanged. Two buffers of keys
    alternate: each receives every second block. Gradients travel one hop behind their keys. The
    last rank that adds to them sends them to the owner, past all ranks between.
    """

    call_type = _Call
    keeps = False

    known: dict[bool, Blocks] = field(default_factory=dict, compare=False, repr=False)  # if back

    @classmethod
    def make(cls, ring: Ring, blocks: Workload, at_once: int) -> "SendRecv":
        """Make one; owners' keys arrive one at a time, whatever `at_once` allows."""
        schedule = steps.ring(blocks)
        return cls(schedule, Messages(ring, idle=not schedule.forward.transfers))
