"""Replay: repeating a call without the Python that decided on its operations.

With few tokens, deciding takes the host longer than a GPU takes to compute. Calls are therefore
recorded, as a tape (`tape.py`) or as a CUDA graph (`graphs.py`). Transports and kernels declare
which of these they allow (`Replay`). `Recordings` decides when a recording is used and dropped, for
plans and for swaps of heads.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ring_attention_pytorch.runtime.streams import current_stream

Tensors = tuple[Tensor | Any, ...]  # or None, after the first
Function = Callable[..., Tensors]
_KINDS = 16  # recordings that a plan keeps at most


def _nothing() -> None:
    """Return None: no memory is shared."""


class Replay(NamedTuple):
    """The ways to replay calls of a transport, a swap of heads, or a plan."""

    graph: bool = False  # a CUDA graph can capture all of it: no messages
    # a tape can record all of it: PyTorch's operations and `opaque` functions on the current stream
    # that wait for no host
    tape: bool = False
    # called before a replay: makes the current stream wait for other streams' use of shared memory,
    # and returns a key of that memory
    follow: Callable[[], Hashable] = _nothing

    def both(self, other: "Replay") -> "Replay":
        """Return the ways that both allow; the other shares no memory."""
        return self._replace(graph=self.graph and other.graph, tape=self.tape and other.tape)


NEVER, ALWAYS = Replay(), Replay(graph=True, tape=True)


class Recording(Protocol):
    """A recording of calls with one cache key: the first calls make it, later ones replay it.

    A plan's recordings with `memory` of their own run one after another.
    """

    memory: bool

    @staticmethod
    def key(given: Tensors) -> tuple[Hashable, ...] | None:
        """Return the cache key of a call's tensors, without shapes.

        None if the call must not be recorded: it is traced, transformed or captured already.
        """
        ...

    def run(self, function: Function, owner: Any, given: Tensors) -> Tensors:
        """Return `function(owner, *given)`."""
        ...


class Recordings:
    """Recordings of a plan or its swaps: one for each function and cache key.

    `follow` is as in `Replay`. If it returns another key, all recordings are dropped, because every
    rank has moved to other shared memory.
    """

    def __init__(self, by: Any, follow: Callable[[], Hashable] = _nothing) -> None:
        self.by: Any = by  # a class of recordings
        self.follow: Callable[[], Hashable] = follow
        self._recordings: dict[Hashable, Recording] = {}
        self._memory: Hashable = None
        self._last: torch.cuda.Stream | None = None  # on which a recording with memory ran last

    def __reduce__(self) -> tuple[type["Recordings"], tuple[Any, ...]]:
        """Copy or pickle without recordings: the copy makes its own."""
        return Recordings, (self.by, self.follow)

    def run(self, function: Function, owner: Any, *given: Tensor | Any) -> Any:
        """Return `function(owner, *given)`, replayed by a recording once there is one.

        The function's decisions must depend only on the owner, a plan or swap (which fixes the
        tensors' shapes), and on the cache key: `by.key` of the tensors, and global settings.
        """
        memory, of_tensors = self.follow(), self.by.key(given)
        if of_tensors is None:
            return function(owner, *given)
        if memory != self._memory:
            self._recordings.clear()
            self._memory = memory
        if self.by.memory:
            self._follow_last(current_stream(given[0].device))
        key = (
            function,
            torch._C._get_deterministic_algorithms(),
            torch._C._get_float32_matmul_precision(),
            *of_tensors,
        )
        recording = self._recordings.get(key)
        if recording is None:
            if len(self._recordings) >= _KINDS:
                self._recordings.clear()
            recording = self._recordings[key] = self.by()
        return recording.run(function, owner, given)

    def _follow_last(self, current: torch.cuda.Stream) -> None:
        if self._last not in (None, current):
            current.wait_stream(self._last)
        self._last = current
