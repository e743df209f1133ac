"""Messages, bytes and memory of a call, counted while it runs over threads."""

import weakref

import torch._dynamo  # noqa: F401 - the first operation under a mode would, in all threads at once
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.cases import Attention, shard


def hops(case: Attention, size: int) -> list[tuple[int, int]]:
    """(exchanges, bytes sent) of each rank."""
    _, hub = threads.run(size, lambda ring: shard(case, ring))
    return list(zip(hub.exchanges, hub.sent_bytes))


def forward_only(case: Attention, size: int) -> threads.Hub:
    tensors, mask, _, _ = case.data()

    def main(ring: Ring) -> None:
        at, _ = case.places(ring.rank, size)
        ring_attn(
            *(t[:, at] for t in tensors), **case.options(), layout=case.layout, group=ring,
            key_mask=None if mask is None else mask[:, at], transport=case.transport,
            ulysses=case.ulysses, memory=case.memory,
        )  # fmt: skip

    return threads.run(size, main)[1]


class Live(TorchDispatchMode):
    """The most bytes of tensors made here that were alive at once."""

    def __init__(self):
        super().__init__()
        self.owners: dict[int, list[int]] = {}  # storage -> [tensors that use it, bytes]
        self.bytes = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(t, Tensor):
                self._born(t)
        return result

    def _born(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        owner = self.owners.get(storage._cdata)
        if owner is None:
            owner = self.owners[storage._cdata] = [0, storage.nbytes()]
            self.bytes += owner[1]
            self.most = max(self.most, self.bytes)
        owner[0] += 1
        weakref.finalize(t, self._died, storage._cdata)

    def _died(self, storage: int) -> None:
        owner = self.owners[storage]
        owner[0] -= 1
        if owner[0] == 0:
            del self.owners[storage]
            self.bytes -= owner[1]


def needed(case: Attention, size: int) -> list[int]:
    """Return how many keys of others each rank can see, counted pair by pair."""
    places = [case.places(rank, size)[0] for rank in range(size)]
    far = case.length if case.window is None else case.window

    def seen(rank: int, owner: int) -> int:
        behind = places[rank][:, None] - places[owner]
        visible = (behind <= far) & (behind >= (0 if case.causal else -far))
        return int(visible.any(0).sum())

    return [sum(seen(r, o) for o in range(size) if o != r) for r in range(size)]
