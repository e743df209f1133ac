"""Checks that a GPU makes of a ring's other ranks, while its host is far ahead of it.

A call's kernels are launched long before they run, so no host can compare what ranks do at the
moment. The GPU does: in memory that ranks share, each says what it has come for, and over NCCL each
message comes with a stamp. Where these differ, or where a rank does not come within the group's
timeout, what was to come is NaN, and so is all that comes later. The host hears of it at its next
call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from ring_attention_pytorch.ranks.failure_reports import Overdue
from ring_attention_pytorch.runtime.launches import Launch
from ring_attention_pytorch.runtime.streams import capturing, current_stream
from ring_attention_pytorch.runtime.tape import opaque, prepared

_STAMPS = 1 << 20  # a message out of step passes for another one time in a million
_KINDS, _PLANS = 1 << 16, 1 << 15  # that meetings tell apart, in 31 bits
_BLOCK = 4096  # bytes that one program fills at a time
_PROGRAMS = 16  # that fill what is wrong, which need not be fast


class Guard:
    """The checks of one ring on one device: kernels that set a flag, and tell the host why.

    They are launched on the current stream, and CUDA graphs can hold them. The flag lies on the
    device, beside the `addresses` that the kernels need; `_triton_guard` says how.
    """

    def __init__(self, device: torch.device, *addresses: int) -> None:
        self.device = device
        with torch.inference_mode(False):  # else nobody could write them outside of that
            self._flags = torch.zeros(5, dtype=torch.int64, pin_memory=device.type == "cuda")
            self._anything = self._flags[0]  # read in 0.15 us
            state = [0, 0, 0, self._flags.data_ptr(), *addresses]
            self.state: Tensor = torch.tensor(state, dtype=torch.int64, device=device)
        self.wait()

    def trouble(self) -> str | None:
        """Say what was found wrong; None if nothing was, so far: the device is not waited for."""
        if not self._anything.item():
            return None
        self.wait()
        _, rank, expected, came, _ = self._flags.tolist()
        return self.explained(rank, expected, came)

    def explained(self, rank: int, expected: int, came: int) -> str:
        """Say in words what the device found: something else than expected came from that rank."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until the device has done all that it was told to: no meeting takes for ever."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def reset(self) -> None:
        """Forget what was found. Nothing of this ring is under way on any rank's device."""
        self.state[:3] = 0
        self.wait()
        self._flags[:4] = 0

    def fail(self) -> None:
        """Let the others know at once that this rank has failed, if they can know it from here."""


class SharedGuard(Guard):
    """A guard in memory that ranks share: `memories[rank]` of each, int64 zeros, as seen from here.

    `patience` is how long it waits for another rank at most, in seconds.
    """

    def __init__(
        self, device: torch.device, rank: int, memories: Sequence[Tensor], patience: float
    ) -> None:
        super().__init__(device, *(memory.data_ptr() for memory in memories))
        self.rank: int = rank
        self.ranks: int = len(memories)
        self.memories: Sequence[Tensor] = memories
        self.patience: int = int(patience * 1e9)

    def fail(self) -> None:
        if self.device.type != "cuda":
            self.mark_failed()
            return
        stream = torch.cuda.Stream(self.device)  # the current one may be waiting
        with torch.cuda.stream(stream):
            self.mark_failed()
        if not capturing(self.device):
            current_stream(self.device).wait_stream(stream)  # what comes later knows it

    def mark_failed(self) -> None:
        """Write in all ranks' memory that this rank has failed, on the current stream."""
        raise NotImplementedError

    def late(self, rank: int, purpose: str) -> str:
        """Say that this rank did not come in time."""
        return f"rank {rank} did not come within {self.patience / 1e9:g} s: {purpose}"

    def reset(self) -> None:
        self.memories[self.rank].zero_()
        super().reset()


class Board(SharedGuard):
    """A guard of ranks that share memory: they meet there, each for a purpose.

    Every rank's board is `[2, ranks]`. All ranks come to the same meetings in the same order.
    """

    def __init__(
        self, device: torch.device, rank: int, boards: Sequence[Tensor], patience: float
    ) -> None:
        super().__init__(device, rank, boards, patience)
        self._kinds: dict[int, str] = {}  # of meetings, by their numbers

        from ring_attention_pytorch.ranks import _triton_guard as kernels

        lanes = max(32, 1 << (self.ranks - 1).bit_length())  # threads that wait, each for a rank
        self.among: dict[str, Any] = dict(RANKS=self.ranks, LANES=lanes)
        self._wait = Launch(kernels.barrier_kernel, 1, num_warps=1, **self.among)
        self._fail = Launch(kernels.fail_kernel, 1, num_warps=1, **self.among)
        self._fill_nan = Launch(kernels.fill_nan_kernel, _PROGRAMS, **self.among, BLOCK=_BLOCK)

    def wait_for_all(self, kind: str, plan: int = 0) -> None:
        """Let the current stream wait until all ranks have come, and check that it is for this.

        There are few kinds, and any number of plans.
        """
        with torch.cuda.device_of(self.state):
            self.barrier(kind, plan)()

    def barrier(self, kind: str, plan: int = 0) -> "Barrier":
        """Return such a meeting, to be called for over and over where this device is current."""
        number = crc32(kind.encode()) % _KINDS
        self._kinds[number] = kind
        return Barrier(self, plan % _PLANS * _KINDS + number)

    def arrive(self, purpose: int) -> None:
        """Come to the meeting of that purpose, on the current device."""
        self._wait(self.state, purpose, self.rank, self.patience)

    @opaque
    def fill_nan(self, *tensors: Tensor) -> None:
        """Fill dense tensors, read in others' memory, with NaN if a rank was out of step."""
        with torch.cuda.device_of(self.state):
            self.fill_nan_here(*filter(Tensor.numel, tensors))

    def fill_nan_here(self, *tensors: Tensor) -> None:
        """Spoil tensors that are not empty, on the current device."""
        for t in tensors:
            self._fill_nan(self.state, self.rank, t.data_ptr(), t.nbytes)

    def mark_failed(self) -> None:
        self._fail(self.state, self.rank)

    def explained(self, rank: int, expected: int, came: int) -> str:
        purpose = self._purpose(expected)
        if came == expected:  # `FAILED`, both
            return f"rank {rank} has failed"
        if came == -1:
            return f"rank {rank} has failed, which this one waited for: {purpose}"
        if came >> 32 != expected >> 32:
            return self.late(rank, purpose)
        return f"rank {rank} has come for {self._purpose(came)}, and this one for {purpose}"

    def _purpose(self, word: int) -> str:
        plan, number = divmod(word % (_PLANS * _KINDS), _KINDS)
        kind = self._kinds.get(number, "what this rank has never done")
        return f"{kind} by plan {plan}" if plan else kind


@prepared(Board.fill_nan)
def _(board: Board, *tensors: Tensor) -> Callable[..., None]:
    return Board.fill_nan_here if all(map(Tensor.numel, tensors)) else Board.fill_nan


@dataclass(frozen=True)
class Barrier:
    """A meeting on a board, for a purpose."""

    board: Board
    purpose: int

    def __call__(self, *_: object, **__: object) -> None:
        self.board.arrive(self.purpose)


class Stamps(Guard):
    """A guard of messages that are matched by their order alone, as NCCL's are.

    Each comes with a stamp: a number of the call that it is for. Those that do not come within the
    `timeout`, in seconds, are reported, because NCCL ends the process then.
    """

    def __init__(self, device: torch.device, timeout: float) -> None:
        super().__init__(device)
        self._number, self._overdue = 0, Overdue(self._flags[4].item, timeout)
        with torch.inference_mode(False):  # of which the stamps that are sent are views
            self._every = torch.arange(_STAMPS, dtype=torch.int32, device=device)

        from ring_attention_pytorch.ranks._triton_guard import compare_kernel

        self._compare = Launch(compare_kernel, _PROGRAMS, BLOCK=_BLOCK)

    def of(self, tag: int) -> Tensor:
        """Return the stamp of messages with this tag, int32 `[1]`."""
        return self._every[tag % _STAMPS :][:1]

    def empty(self) -> Tensor:
        """Return memory for a stamp that comes."""
        return torch.empty_like(self._every[:1])

    def compare(
        self,
        stamps: Sequence[Tensor],
        tag: int,
        messages: Sequence[tuple[int, Tensor]],
        waiting: object = "",
    ) -> None:
        """Fill ranks' messages with NaN whose stamps are not this tag's, and all that come after.

        `waiting` is what to report if they don't come.
        """
        self._number += 1
        self._overdue.add(self._number, waiting)
        with torch.cuda.device_of(self.state):
            for stamp, (rank, message) in zip(stamps, messages):
                self._compare(
                    self.state, self._number, stamp.data_ptr(), rank, tag % _STAMPS,
                    message.data_ptr(), message.nbytes,
                )  # fmt: skip

    def explained(self, rank: int, expected: int, came: int) -> str:
        return f"what rank {rank} sent was for another call"
