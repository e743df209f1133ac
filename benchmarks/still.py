"""A gather where nothing travels: what is left of its time is no transport's to save.

Calls of the kernel, merging, own sums and the host remain, as of a gather that overlaps, be there
few tokens that would come together.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.rings import Attend
from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.comm.gather import Gather
from ring_attention_pytorch.comm.gather_symmetric import apart
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.schedule.pieces import Round, tokens

ALONE = "calls alone, "


@dataclass(frozen=True)
class Still(Gather):
    """Own keys stand for the others', and nothing travels: the results mean nothing."""

    gather: Gather  # that divides own keys
    standing: dict[int, list[Tensor]] = field(default_factory=dict, compare=False, repr=False)

    def _cut(self, length: int) -> int:
        return self.gather._cut(length)

    def _pull(
        self, own: KVBlock, group: Round
    ) -> Callable[[], tuple[list[Tensor], Iterable[slice]]]:
        if id(group) not in self.standing:
            length = tokens(group.pieces[self.ring.rank])
            rows = torch.cat((own.k, own.v), dim=-1).detach()  # as keys lie that were pulled
            given = [rows] if own.key_mask is None else [rows, own.key_mask]
            times = 1 + length // max(1, own.k.shape[1])
            rows, *mask = (torch.cat([t] * times, dim=1)[:, :length] for t in given)
            self.standing[id(group)] = [*apart(rows, own), *mask]
        return lambda: (self.standing[id(group)], self._parts(group))

    def _send_home(self, *_: object) -> Callable[[], None]:
        return lambda: None


def still(plan: RingPlan) -> Attend:
    """The calls that a gather's plan makes of its kernel on this rank."""
    gather = plan.overlapped or plan.transport
    nothing_travels = Still(gather.ring, gather.groups, gather.lengths, gather)
    alone = plan.by(nothing_travels)
    return lambda q, k, v: ring_attn(q, k, v, plan=alone)
