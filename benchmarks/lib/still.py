"""Run a gather where nothing travels: what is left of its time is no transport's to save.

Calls of the kernel, merging, own sums and the host remain, as of a gather that overlaps, be there
few tokens that would come together.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.lib.rings import Attend, planned
from ring_attention_pytorch import RingPlan
from ring_attention_pytorch.comm.fabric import KVGrads
from ring_attention_pytorch.comm.fabric_messages import MessageChannel, Messages
from ring_attention_pytorch.comm.fabric_shared import apart
from ring_attention_pytorch.comm.gather import Gather
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.schedule.pieces import tokens
from ring_attention_pytorch.schedule.steps import Program, Transfer

ALONE = "calls alone"


@dataclass(frozen=True)
class Still(Messages):
    """A fabric by which nothing travels: own keys stand for the others'; results mean nothing."""

    keys: dict[int, list[Tensor]] = field(default_factory=dict)  # of each block

    def channel(
        self, program: Program, own: KVBlock, totals: KVGrads | None = None
    ) -> MessageChannel:
        return _Channel(self, program, own, totals)


class _Channel(MessageChannel):
    fabric: Still

    def put(self, transfer: Transfer) -> None:
        keys, block, own = self.fabric.keys, transfer.block, self.own
        if block not in keys:
            length = tokens(self.program.chunks(block, self.fabric.ring.rank))
            rows = torch.cat((own.k, own.v), dim=-1).detach()  # as keys lie that were pulled
            given = [rows] if own.key_mask is None else [rows, own.key_mask]
            times = 1 + length // max(1, own.k.shape[1])
            rows, *mask = (torch.cat([t] * times, dim=1)[:, :length] for t in given)
            keys[block] = [*apart(rows, own), *mask]

    def take(self, transfer: Transfer) -> list[Tensor]:
        return self.fabric.keys[transfer.block]

    def give(self, transfer: Transfer, grads: KVGrads) -> None:
        pass

    def reduce(self, transfer: Transfer) -> None:
        pass


def still(plan: RingPlan) -> Attend:
    """Return the calls that a gather's plan makes of its kernel on this rank."""
    gather = plan.chosen.overlapping_transport or plan.transport
    return planned(plan.by(Gather(gather.schedule, Still(gather.fabric.ring))))
