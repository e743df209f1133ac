"""Partial results of all ranks: one packed message to each, or words in shared memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ring_attention_pytorch.comm.failures import timeout_of
from ring_attention_pytorch.comm.guard import Guard
from ring_attention_pytorch.comm.ring import Ring
from ring_attention_pytorch.comm.symmetric_memory import PeerGroup, allocate
from ring_attention_pytorch.runtime.streams import capturing, current_stream

_FAILED = -1
_CALLS = 1 << 20
MOST = 1 << 26  # bytes of shared memory that one plan takes at most


def gathered(ring: Ring, message: Tensor) -> Tensor:
    """Return the message of every rank, `[ranks, *message.shape]`."""
    found = message.new_empty((ring.size, *message.shape))
    others = [rank for rank in range(ring.size) if rank != ring.rank]
    transfer = ring.exchange(
        [(rank, message) for rank in others], [(rank, found[rank]) for rank in others]
    )
    found[ring.rank] = message
    transfer.wait()
    return found


def words_of(rows: int, width: int, ranks: int) -> int:
    """Return how many words of 64 bits a rank's memory has, for rows of `width` numbers and lse."""
    return 2 * ranks * rows * (width + 1) + ranks


class PushedRows(Guard):
    """Memory in which all ranks write their rows, and what is checked there: `_triton_merge`.

    Every rank has `memories[rank]`, int64 zeros, `words_of(...)` of them. `patience` is how long it
    waits at most, in seconds.
    """

    def __init__(
        self, device: torch.device, rank: int, memories: Sequence[Tensor], patience: float
    ) -> None:
        super().__init__(device, *(memory.data_ptr() for memory in memories))
        self.rank, self.ranks, self.memories = rank, len(memories), memories
        self.patience = int(patience * 1e9)

    @classmethod
    def among(cls, shared: PeerGroup, ring: Ring, words: int) -> "PushedRows":
        """Allocate memory that the ranks of a ring share. All of them call this together."""
        space, group, _ = shared
        _, memories, handle = allocate(group, space.device, (words,), torch.int64)
        found = cls(space.device, group.rank(), memories, timeout_of(group).total_seconds())
        found.handle = handle
        ring.steps.watch(found)
        ring.gather_notes("rows of a cache", b"")  # all memory is there, and zero
        return found

    handle: object = None  # keeps the memory

    def fail(self) -> None:
        if self.device.type != "cuda":
            self._mark_failed()
            return
        stream = torch.cuda.Stream(self.device)  # the current one may be waiting
        with torch.cuda.stream(stream):
            self._mark_failed()
        if not capturing(self.device):
            current_stream(self.device).wait_stream(stream)

    def _mark_failed(self) -> None:
        self.state[0] = 1
        for memory in self.memories:
            memory[self.rank - self.ranks] = _FAILED

    def explained(self, rank: int, expected: int, came: int) -> str:
        if came == _FAILED:
            return f"rank {rank} has failed, while this one decoded"
        if (came ^ expected) >> 12:
            seconds = self.patience / 1e9
            return f"rank {rank} did not come within {seconds:g} s: attention to a cache"
        return f"rank {rank} has called attention to a cache with other shapes or options"

    def reset(self) -> None:
        self.memories[self.rank].zero_()
        super().reset()
