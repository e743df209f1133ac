"""Shared memory for the partial results of all ranks."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ring_attention_pytorch.comm.symmetric_memory import allocate, shared_by
from ring_attention_pytorch.ranks.failures import timeout_of
from ring_attention_pytorch.ranks.guard import SharedGuard
from ring_attention_pytorch.ranks.ring import Ring

_FAILED = -1
_WORDS = 1 << 22  # for the rows of one call, all ranks together: 64 MiB for two calls

_rows: WeakKeyDictionary[ProcessGroup, "PushedRows | None"] = WeakKeyDictionary()


class PushedRows(SharedGuard):
    """Memory to which all ranks of a group write their rows, and its checks.

    `_triton_merge` documents the format. Every rank's memory has `words_for(slot, ranks)` words of
    64 bits, `slot` of them for one rank's rows.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int,
        memories: Sequence[Tensor],
        slot: int,
        patience: float,
    ) -> None:
        super().__init__(device, rank, memories, patience)
        self.slot: int = slot

    @staticmethod
    def words_for(slot: int, ranks: int) -> int:
        """Return how many words a rank's memory has."""
        return ranks * (2 * slot + 3)

    handle: object = None  # keeps the memory alive

    def mark_failed(self) -> None:
        self.state[0] = 1
        for memory in self.memories:
            memory[self.rank - self.ranks] = _FAILED

    def explained(self, rank: int, expected: int, came: int) -> str:
        if came == _FAILED:
            return f"rank {rank} has failed, while this one decoded"
        if came >> 32 != expected >> 32:
            return self.late(rank, "attention to a cache")
        return (
            f"rank {rank} has called attention to a cache with other shapes or options, or its "
            "cache has sequences of other lengths, order or padding"
        )


def pushed_rows(ring: Ring, device: torch.device) -> PushedRows | None:
    """Return a group's memory for rows, allocated on first use; None if ranks share no memory.

    All ranks of the group call this together and get the same answer.
    """
    if ring.size == 1 or (shared := shared_by(ring, device)) is None:
        return None
    _, group, _ = shared
    if group not in _rows:
        slot = _WORDS // ring.size
        words = PushedRows.words_for(slot, ring.size)
        _, memories, handle = allocate(group, device, (words,), torch.int64)
        patience = timeout_of(group).total_seconds()
        found = _rows[group] = PushedRows(device, group.rank(), memories, slot, patience)
        found.handle = handle
        ring.steps.watch(found)
        ring.gather_notes("rows of attention to a cache", b"")  # all memory is there, and zero
    return _rows[group]
