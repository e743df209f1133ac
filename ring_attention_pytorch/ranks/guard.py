"""Checks that a GPU makes of a ring's other ranks, while its host is far ahead of it.

A call's kernels are launched long before they run, so no host can compare what ranks are doing. The
GPU does. On a board in shared memory each rank writes the purpose of its barrier; over NCCL each
message has a stamp. If these differ, or a rank does not arrive within the group's timeout, the data
are filled with NaN, and so are all later ones. The host raises in its next call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from ring_attention_pytorch.ranks.failure_reports import Overdue
from ring_attention_pytorch.runtime.launches import Launch, Live
from ring_attention_pytorch.runtime.streams import capturing, current_stream
from ring_attention_pytorch.runtime.tape import opaque, prepared

_STAMPS = 1 << 20  # a message out of step has the expected stamp one time in a million
_KINDS, _PLANS, _CALLS = 1 << 12, 1 << 12, 127  # distinct purposes of barriers, in 31 bits
_BLOCK = 4096  # bytes that one program fills at a time
_PROGRAMS = 16  # for filling with NaN, which need not be fast


class Guard:
    """The checks of one ring on one device: kernels that set a flag, and report why to the host.

    They are launched on the current stream, and CUDA graphs can record them. The device holds the
    flag and the `addresses` that the kernels need; `_triton_guard` describes the words.
    """

    def __init__(self, device: torch.device, *addresses: int) -> None:
        self.device = device
        with torch.inference_mode(False):  # inference tensors could not be written in other modes
            self._flags = torch.zeros(5, dtype=torch.int64, pin_memory=device.type == "cuda")
            self._anything = self._flags[0]  # read in 0.15 us
            state = [0, 0, 0, self._flags.data_ptr(), *addresses]
            self.state: Tensor = torch.tensor(state, dtype=torch.int64, device=device)
        self.wait()

    def trouble(self) -> str | None:
        """Return a failure that the device has flagged, or None. Does not wait for the device."""
        if not self._anything.item():
            return None
        self.wait()
        _, rank, expected, came, _ = self._flags.tolist()
        return self.explained(rank, expected, came)

    def explained(self, rank: int, expected: int, came: int) -> str:
        """Return the text of a failure: that rank sent `came` where another word was `expected`."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait for all work of the device; a barrier ends after its timeout."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def reset(self) -> None:
        """Clear all flags. Nothing of this ring may be in flight on any rank's device."""
        self.state[:3] = 0
        self.wait()
        self._flags[:4] = 0

    def fail(self) -> None:
        """Notify the other ranks at once that this one has failed, if the device can."""


class SharedGuard(Guard):
    """A guard in shared memory: `memories[rank]` is each rank's, int64 zeros, mapped on this rank.

    `patience` is the longest wait for another rank, in seconds.
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
            current_stream(self.device).wait_stream(stream)  # later work sees the mark

    def mark_failed(self) -> None:
        """Mark this rank as failed in all ranks' memory, on the current stream."""
        raise NotImplementedError

    def late(self, rank: int, purpose: str) -> str:
        """Return the text for a rank that did not arrive in time."""
        return f"rank {rank} did not come within {self.patience / 1e9:g} s: {purpose}"

    def reset(self) -> None:
        self.memories[self.rank].zero_()
        super().reset()


class Board(SharedGuard):
    """A guard of ranks that share memory: they wait at barriers, each for a purpose.

    Every rank's board is `[2, ranks]`. All ranks reach the same barriers in the same order. Texts
    have the ranks' `names`, if these are some of a ring's.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int,
        boards: Sequence[Tensor],
        patience: float,
        names: Sequence[int] = (),
    ) -> None:
        super().__init__(device, rank, boards, patience)
        self._names: Sequence[int] = names or range(len(boards))
        self._kinds: dict[int, str] = {}  # of barriers, by their numbers

        from ring_attention_pytorch.ranks import _triton_guard as kernels

        lanes = max(32, 1 << (self.ranks - 1).bit_length())  # waiting threads, one per rank
        self.among: dict[str, Any] = dict(RANKS=self.ranks, LANES=lanes)
        self._wait = Launch(kernels.barrier_kernel, 1, num_warps=1, **self.among)
        self._fail = Launch(kernels.fail_kernel, 1, num_warps=1, **self.among)
        self._fill_nan = Launch(kernels.fill_nan_kernel, _PROGRAMS, **self.among, BLOCK=_BLOCK)

    def wait_for_all(self, kind: str, plan: int = 0) -> None:
        """Make the current stream wait until all ranks arrive, and check their purpose.

        A purpose is a `kind`, one of a few, and the number of a `plan`, any of many.
        """
        with torch.cuda.device_of(self.state):
            self.barrier(kind, plan)()

    def barrier(
        self, kind: str, plan: int = 0, back_of: Callable[[], int | None] = lambda: None
    ) -> "Barrier":
        """Return this barrier, to be called many times while this device is current.

        `back_of` is asked each time for the call that is differentiated, so that two backwards of
        equal calls differ. None and 0, of a call that is unknown, match any.
        """
        number = crc32(kind.encode()) % _KINDS
        self._kinds[number] = kind
        return Barrier(self, plan % _PLANS * _KINDS + number, back_of)

    def arrive(self, purpose: int) -> None:
        """Launch the barrier of that purpose on the current device."""
        self._wait(self.state, purpose, self.rank, self.patience)

    @opaque
    def fill_nan(self, *tensors: Tensor) -> None:
        """Fill dense tensors, read from peers' memory, with NaN if a rank was out of step."""
        with torch.cuda.device_of(self.state):
            self.fill_nan_here(*filter(Tensor.numel, tensors))

    def fill_nan_here(self, *tensors: Tensor) -> None:
        """Fill tensors that are not empty, on the current device."""
        for t in tensors:
            self._fill_nan(self.state, self.rank, t.data_ptr(), t.nbytes)

    def mark_failed(self) -> None:
        self._fail(self.state, self.rank)

    def explained(self, rank: int, expected: int, came: int) -> str:
        purpose, rank = self._purpose(expected), self._names[rank]
        if came == expected:  # `FAILED`, both
            return f"rank {rank} has failed"
        if came == -1:
            return f"rank {rank} has failed, which this one waited for: {purpose}"
        if came >> 32 != expected >> 32:
            return self.late(rank, purpose)
        theirs = self._purpose(came)
        if theirs == purpose:
            return f"rank {rank} has come for {purpose}, as this one, but of another call"
        return f"rank {rank} has come for {theirs}, and this one for {purpose}"

    def _purpose(self, word: int) -> str:
        plan, number = divmod(word % (_PLANS * _KINDS), _KINDS)
        kind = self._kinds.get(number, "what this rank has never done")
        return f"{kind} by plan {plan}" if plan else kind


@prepared(Board.fill_nan)
def _(board: Board, *tensors: Tensor) -> Callable[..., None]:
    return Board.fill_nan_here if all(map(Tensor.numel, tensors)) else Board.fill_nan


@dataclass(frozen=True)
class Barrier(Live):
    """A barrier on a board, for a purpose, whose number kernels are given."""

    board: Board
    number: int  # of its kind and plan
    back_of: Callable[[], int | None] = field(compare=False)

    def read(self) -> int:
        back_of = self.back_of()
        call = 1 + back_of % _CALLS if back_of else 0
        return call * _PLANS * _KINDS + self.number

    def __call__(self, *_: object, **__: object) -> None:
        self.board.arrive(self.read())


class Stamps(Guard):
    """A guard of messages that match by their order alone, as NCCL's do.

    Each message has a stamp: a number of its call. Messages that do not arrive within the
    `timeout`, in seconds, are logged, because NCCL then ends the process.
    """

    def __init__(self, device: torch.device, timeout: float) -> None:
        super().__init__(device)
        self._number, self._overdue = 0, Overdue(self._flags[4].item, timeout)
        with torch.inference_mode(False):  # the stamps that are sent are views of this
            self._every = torch.arange(_STAMPS, dtype=torch.int32, device=device)

        from ring_attention_pytorch.ranks._triton_guard import compare_kernel

        self._compare = Launch(compare_kernel, _PROGRAMS, BLOCK=_BLOCK)

    def of(self, tag: int) -> Tensor:
        """Return the stamp of messages with this tag, int32 `[1]`."""
        return self._every[tag % _STAMPS :][:1]

    def empty(self) -> Tensor:
        """Allocate memory for an incoming stamp."""
        return torch.empty_like(self._every[:1])

    def compare(
        self,
        stamps: Sequence[Tensor],
        tag: int,
        messages: Sequence[tuple[int, Tensor]],
        waiting: object = "",
    ) -> None:
        """Fill messages whose stamps are not this tag's with NaN, and all later messages.

        `waiting` is logged if they do not arrive in time, unless a CUDA graph is captured.
        """
        self._number += 1
        number = self._number
        if self.device.type == "cuda" and capturing(self.device):
            number = 0  # replays come at no known time
        else:
            self._overdue.add(number, waiting)
        with torch.cuda.device_of(self.state):
            for stamp, (rank, message) in zip(stamps, messages):
                self._compare(
                    self.state, number, stamp.data_ptr(), rank, tag % _STAMPS,
                    message.data_ptr(), message.nbytes,
                )  # fmt: skip

    def explained(self, rank: int, expected: int, came: int) -> str:
        return f"what rank {rank} sent was for another call"
