"""Calls as CUDA graphs: the host launches each at once, whatever it consists of.

Where tokens are few, Python takes longer to launch the kernels of a ring attention than a GPU
takes to run them. A graph reads and writes where it did when it was captured, so what a call is
given is copied there, and its results are copied out: layers may share graphs, and results are like
any others.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.lanes import capturing, current_stream

Results = tuple[Tensor | None, ...]


class Graphs:
    """Those of one plan: one for each function of it, and of what is given.

    The first call goes as ever, and makes what is made once; the second captures. `follow` is
    called before each replay.
    """

    def __init__(self, device: torch.device, follow: Callable[[], None]) -> None:
        self.device, self.follow = device, follow
        self._kept: dict[tuple, _Graph | None] = {}
        self._last: torch.cuda.Stream | None = None  # that was told to replay

    def run(self, function: Callable[..., Results], plan: Any, *given: Tensor | None) -> Results:
        """What the function gives for its plan and tensors that are always like these."""
        if capturing(self.device):
            return function(plan, *given)  # a graph holds what others would do, not them
        kind = function, *(None if t is None else t.dtype for t in given)
        if kind not in self._kept:
            found = function(plan, *given)
            self._kept[kind] = None
            return found
        self._follow_stream()
        if (graph := self._kept[kind]) is None:
            graph = self._kept[kind] = _Graph(self.device, function, plan, given)
        return graph.replay(given)

    def _follow_stream(self) -> None:
        """Where another stream was told to replay, or to use what is shared, wait for that."""
        self.follow()
        current = current_stream(self.device)
        if self._last not in (None, current):
            current.wait_stream(self._last)
        self._last = current


class _Graph:
    """What a function does with tensors like these, in memory of its own."""

    def __init__(
        self,
        device: torch.device,
        function: Callable[..., Results],
        plan: Any,
        given: Results,
    ) -> None:
        with torch.inference_mode(False):
            places = [
                None if t is None else torch.empty_like(t, memory_format=torch.contiguous_format)
                for t in given
            ]
        self._places = [t for t in places if t is not None]
        self._replay, self._results = captured(lambda: function(plan, *places), device)

    def replay(self, given: Results) -> Results:
        torch._foreach_copy_(self._places, [t for t in given if t is not None])
        self._replay()
        return tuple(None if t is None else t.clone() for t in self._results)


def captured(
    run: Callable[[], Results], device: torch.device
) -> tuple[Callable[[], None], Results]:
    """What does again what the function tells the device, and where its results are then."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    # other threads' errors don't count: NCCL's ask the device things meanwhile
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        results = run()
    return graph.replay, results
