"""Replay: what may repeat a call without the Python that decided on it, and the front for it.

Where tokens are few, deciding takes the host longer than a GPU takes to compute. What is the same
in each call is recorded, in one of two ways: as a tape (`tape.py`) or as a CUDA graph
(`graphs.py`). Which may be, transports and kernels say of themselves (`Replay`). When a recording
is used, and when it is dropped, is decided here for both, and for swaps of heads as for plans.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ring_attention_pytorch.runtime.streams import current_stream

Tensors = tuple[Tensor | Any, ...]  # or None, after the first
Function = Callable[..., Tensors]
_KINDS = 16  # kinds of calls whose recordings a plan keeps


def _nothing() -> None:
    """Return which memory is shared, where there is none."""


class Replay(NamedTuple):
    """What may replay calls: of a transport, a swap of heads, or a plan."""

    graph: bool = False  # a CUDA graph can hold all of it: nothing is sent
    # a tape can: all of it is PyTorch's operations and `opaque` functions, on the current stream,
    # and waits for no host
    tape: bool = False
    # called before a replay: lets the current stream wait for what other streams do with shared
    # memory, and returns which memory that is
    follow: Callable[[], Hashable] = _nothing

    def both(self, other: "Replay") -> "Replay":
        """Return what may replay calls with another part, which shares no memory."""
        return self._replace(graph=self.graph and other.graph, tape=self.tape and other.tape)


NEVER, ALWAYS = Replay(), Replay(graph=True, tape=True)


class Recording(Protocol):
    """A recording of calls of one kind, made of the first ones, and repeated from then on.

    Those of a plan run one after another if they have `memory` of their own.
    """

    memory: bool

    @staticmethod
    def key(given: Tensors) -> tuple[Hashable, ...] | None:
        """Return what must be the same of a call's tensors, beside shapes.

        None where none is to be recorded: operations are not what they seem, or recorded already.
        """
        ...

    def run(self, function: Function, owner: Any, given: Tensors) -> Tensors:
        """Return `function(owner, *given)`."""
        ...


class Recordings:
    """Recordings of a plan or its swaps: one for each function, and for each kind of arguments.

    `follow` is as in `Replay`. Recordings of other memory than it returns are dropped, for the
    other ranks have left that, too.
    """

    def __init__(self, by: Any, follow: Callable[[], Hashable] = _nothing) -> None:
        self.by: Any = by  # a class of recordings
        self.follow: Callable[[], Hashable] = follow
        self._recordings: dict[Hashable, Recording] = {}
        self._memory: Hashable = None
        self._last: torch.cuda.Stream | None = None  # on which one ran that has memory

    def __reduce__(self) -> tuple[type["Recordings"], tuple[Any, ...]]:
        """Copy or pickle none of them: what is made of this makes its own."""
        return Recordings, (self.by, self.follow)

    def run(self, function: Function, owner: Any, *given: Tensor | Any) -> Any:
        """Return `function(owner, *given)`, by a recording once there is one.

        All that the function decides must depend on the owner, a plan or a swap, and on what a kind
        has: what the recording asks of tensors that are otherwise always alike, global settings.
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
