"""CUDA graphs of a plan's calls: the host launches each whole call at once.

With few tokens, Python takes longer to launch the kernels of a ring attention than a GPU takes to
run them. A graph reads and writes the memory with which it was captured. Before each launch the
addresses in its nodes are therefore set to the call's tensors: nothing is copied, and results are
ordinary tensors.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.runtime.graph_nodes import Addresses, Capture, can_be_set
from ring_attention_pytorch.runtime.replay import Function, Recordings, Replay, Tensors
from ring_attention_pytorch.runtime.streams import capturing, passing_capture
from ring_attention_pytorch.runtime.uncopied import replaced

_ALIGNMENT = 32  # bytes: kernels read this many at once if addresses are multiples of it


def has_graphs(owner: Any) -> bool:
    """True if CUDA graphs replay the calls of this plan or swap."""
    return owner.recordings is not None and owner.recordings.by is Graph


def graphs_refusal(plan: Any) -> str | None:
    """Return why a plan can't have CUDA graphs of its own; None if it can."""
    if not plan.replay.graph:
        return (
            "CUDA graphs need tensors on CUDA, keys in memory that GPUs share, no messages; "
            f"got {plan.device.type}, {type(plan.transport).__name__}; leave in_graphs() out"
        )
    if can_be_set():
        return None
    return "CUDA graphs need a driver of CUDA 12.4 or newer; update it, or leave in_graphs() out"


def with_graphs(plan: Any) -> Any:
    """Return a plan with graphs of its own.

    `replace` on it gives a plan without graphs; only swaps of heads keep theirs. With a graph,
    overlapping calls cost no extra host time, so the overlapping transport is used. Kernels that
    merge by themselves get slower by overlap, so their transport stays.
    """
    merges = plan.kernel.traits.fuses_merge
    transport = plan.transport if merges else plan.chosen.overlapping_transport or plan.transport
    swap = plan.ulysses
    if swap is not None and swap.by.replay.graph and not has_graphs(swap):
        swap = _recorded(replace(swap), swap.by.replay)
    found = replaced(plan if transport is plan.transport else plan.by(transport), ulysses=swap)
    return _recorded(found, found.replay)


def _recorded(owner: Any, replay: Replay) -> Any:
    object.__setattr__(owner, "recordings", Recordings(Graph, replay.follow))
    return owner


class Graph:
    """A CUDA graph of a function's call with tensors of given shapes and dtypes.

    The first call runs the function eagerly, which fills caches; the second captures it.
    The function also takes `into=`: memory for its results, None for a result that is None.
    """

    memory = True

    def __init__(self) -> None:
        self.replay: Callable[[Tensors], None] | None = None
        self._results: Tensors = ()  # shapes and dtypes of the results, with one element's memory

    @staticmethod
    def key(given: Tensors) -> tuple[Hashable, ...] | None:
        """Return the tensors' dtypes, None for missing ones; None while a graph is captured.

        An outer capture records the operations themselves, not inner graphs.
        """
        if capturing(given[0].device):
            return None
        return tuple([None if t is None else t.dtype for t in given])

    def run(self, function: Function, owner: Any, given: Tensors) -> Tensors:
        """Return `function(owner, *given)`, replayed by the graph once there is one."""
        given = tuple([None if t is None else _readable(t) for t in given])
        if not self._results:
            found = function(owner, *given)
            self._results = tuple(
                [None if t is None else t.new_empty(()).expand(t.shape) for t in found]
            )
            return found
        results = _like(self._results)
        if self.replay is None:
            self.replay = captured(partial(function, owner), given, results, given[0].device)
        self.replay((*given, *results))
        return results


def _readable(t: Tensor) -> Tensor:
    """Return a tensor in the layout that a capture has: copied unless contiguous and aligned."""
    t = t.contiguous()
    return t if t.data_ptr() % _ALIGNMENT == 0 else t.clone()


def _like(tensors: Tensors) -> Tensors:
    """Return new contiguous tensors of the same shapes and dtypes."""
    return tuple([None if t is None else t.new_empty(t.shape) for t in tensors])


def captured(
    function: Function, given: Tensors, results: Tensors, device: torch.device
) -> Callable[[Tensors], None]:
    """Capture a function with tensors like these; return a function that replays it with others."""
    with torch.cuda.device(device):  # the driver's queries need the graph's context
        # both exist at once, so that they have no memory in common
        other, capture = (_capture(function, given, results, device) for _ in range(2))
        graph = capture.graph
        graph.instantiate()
        addresses = Addresses(capture, other)

    def replay(tensors: Tensors) -> None:
        addresses.set(tensors)
        graph.replay()

    return replay


def _capture(function: Function, given: Tensors, results: Tensors, device: torch.device) -> Capture:
    graph, stream = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.Stream(device)
    given, results = _like(given), _like(results)
    # calls of other threads don't break it: NCCL's threads query the device during a capture
    mode: dict[str, Any] = dict(stream=stream, capture_error_mode="thread_local")
    with passing_capture(), torch.cuda.graph(graph, **mode):
        function(*given, into=results)
    return Capture(graph, given, results)
