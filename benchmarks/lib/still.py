"""Run a gather where nothing travels: what is left of its time is no transport's to save.

Calls of the kernel, merging, own sums and the host remain, as of a gather that overlaps, be there
few tokens that would come together.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.lib.rings import Attend, planned
from ring_attention_pytorch import RingPlan
from ring_attention_pytorch.comm.carry_out import KVGrads
from ring_attention_pytorch.comm.gather import Gather, GatherCall
from ring_attention_pytorch.comm.gather_symmetric import apart
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.schedule.pieces import tokens
from ring_attention_pytorch.schedule.steps import KEYS, Program, Transfer

ALONE = "calls alone"


@dataclass(frozen=True)
class Still(Gather):
    """Own keys stand for the others', and nothing travels: the results mean nothing."""

    def call(self, program: Program, own: KVBlock, totals: KVGrads | None = None) -> GatherCall:
        return _Call(self, program, own, totals)


class _Call(GatherCall):
    def _pull(self, transfer: Transfer) -> Callable[[], None]:
        known, block = self.gather.known, transfer.block
        if (KEYS, block) not in known:
            length, own = tokens(self._chunks(block)), self.own
            rows = torch.cat((own.k, own.v), dim=-1).detach()  # as keys lie that were pulled
            given = [rows] if own.key_mask is None else [rows, own.key_mask]
            times = 1 + length // max(1, own.k.shape[1])
            rows, *mask = (torch.cat([t] * times, dim=1)[:, :length] for t in given)
            known[KEYS, block] = [*apart(rows, own), *mask]
        return lambda: self._has_come(block, known[KEYS, block])

    def _send_home(self, transfer: Transfer) -> Callable[[], None]:
        del self.blocks[transfer.source], self.sums[transfer.source]
        return lambda: None


def still(plan: RingPlan) -> Attend:
    """Return the calls that a gather's plan makes of its kernel on this rank."""
    gather = plan.chosen.overlapped or plan.transport
    return planned(plan.by(Still(gather.ring, gather.schedule)))
