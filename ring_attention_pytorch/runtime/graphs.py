"""CUDA graphs of a plan's calls: the host launches each at once, whatever it consists of.

Where tokens are few, Python takes longer to launch the kernels of a ring attention than a GPU takes
to run them. A graph reads and writes the memory with which it was captured. So before it is
launched its nodes are told where a call's tensors are. So these are not copied there, and results
are like any others.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.runtime.graph_nodes import Addresses, Capture, can_be_set
from ring_attention_pytorch.runtime.streams import capturing, current_stream, passing_capture

Tensors = tuple[Tensor | Any, ...]  # or None
Function = Callable[..., Tensors]
_ALIGNMENT = 32  # bytes: kernels read as many at once where addresses are multiples of it
_KINDS = 4  # kinds of batches whose graphs a module keeps


class Graphs:
    """CUDA graphs of a plan or its swaps: one for each function, and for each kind of arguments.

    `follow` is called before each call. It lets the current stream wait for what other streams do
    with shared memory, and returns which memory that is. Graphs of other shared memory are dropped,
    for the other ranks have left it, too.
    """

    device: torch.device
    follow: Callable[[], Hashable]

    def __init__(self, device: torch.device, follow: Callable[[], Hashable]) -> None:
        self.device, self.follow = device, follow
        self._kept: dict[Hashable, _Graph] = {}
        self._shared: Hashable = None
        self._last: torch.cuda.Stream | None = None  # the last that a graph was launched on
        self._layers: dict[int, Any] = {}

    def __reduce__(self) -> tuple[type["Graphs"], tuple[torch.device, Callable[[], Hashable]]]:
        """Copy or pickle none of them: what is made of this makes its own."""
        return Graphs, (self.device, self.follow)

    def run(self, function: Function, plan: Any, *given: Tensor | None) -> Any:
        """Return `function(plan, *given)`, by a graph; the tensors given are always like these.

        The function takes `into=`, too: memory for its results, or None for those that are None.
        """
        if capturing(self.device):
            return function(plan, *given)  # a graph holds what inner graphs would do, not them
        self._follow_streams()
        kind = (
            function, torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            *(None if t is None else t.dtype for t in given),
        )  # fmt: skip
        if kind not in self._kept:
            self._kept[kind] = _Graph(self.device)
        return self._kept[kind].run(partial(function, plan), given)

    def of_layer(self, number: int, make: Callable[[], Any]) -> Any:
        """Return the plan of a layer, which has graphs of its own, made when first asked for."""
        if number not in self._layers:
            self._layers[number] = make()
        return self._layers[number]

    def _follow_streams(self) -> None:
        if (shared := self.follow()) != self._shared:
            self._kept.clear()
            self._shared = shared
        current = current_stream(self.device)
        if self._last not in (None, current):
            current.wait_stream(self._last)  # graphs have memory of their own
        self._last = current


def can_be_captured(plan: Any) -> bool:
    """Tell whether a plan's calls can be CUDA graphs."""
    return plan.device.type == "cuda" and plan.transport.fabric.capturable


def graphs_refusal(plan: Any) -> str | None:
    """Say why a plan can't have CUDA graphs of its own; None if it can."""
    if not can_be_captured(plan):
        return (
            "CUDA graphs need tensors on CUDA, keys in memory that GPUs share, no messages; "
            f"got {plan.device.type}, {type(plan.transport).__name__}; leave in_graphs() out"
        )
    if can_be_set():
        return None
    return "CUDA graphs need a driver of CUDA 12.4 or newer; update it, or leave in_graphs() out"


def with_graphs(plan: Any) -> Any:
    """Return a plan with graphs of its own.

    Replacing something in it gives a plan without graphs; only swaps of heads keep theirs. The host
    launches a graph at once, so calls that overlap cost it nothing more there. Kernels
    that merge by themselves lose by overlapping, so their transport stays.
    """
    transport = plan.transport if plan.kernel.fuses_merge else plan.overlapped or plan.transport
    swap = None if plan.ulysses is None else plan.ulysses.in_graphs(plan.device)
    found = replace(plan if transport is plan.transport else plan.by(transport), ulysses=swap)
    object.__setattr__(found, "graphs", Graphs(plan.device, found.transport.fabric.follow_stream))
    return found


class GraphCache:
    """A module's cache of plans with graphs, for the last few kinds of batches.

    A kind gets graphs from its second batch on, for many lengths come but once. Batches with a
    mask, documents or dropout get none: what is shown or dropped is another thing in each.
    """

    def __init__(self) -> None:
        self._plans: dict[Hashable, Any] = {}
        self._where: Hashable = None

    def of(self, plan: Any) -> Any:
        """Return a plan that does what this one does: one with graphs, if possible and of use."""
        varies = (plan.key_mask, plan.packing, plan.terms.dropout) != (None, None, None)
        if varies or graphs_refusal(plan):
            return plan
        ring, swap = plan.ring, plan.ulysses
        swapped = None if swap is None else (repr(swap.queries), repr(swap.keys))  # where all land
        if ring.group is not None and self._where != (where := (ring.group, plan.device)):
            self._plans, self._where = {}, where  # perhaps nobody else needs the old memory
        kind = (
            plan.signature, plan.blocks, swapped, plan.terms, plan.kernel.name,
            plan.transport_name, plan.at_once, plan.device, ring.group, ring.first, ring.size,
            torch.is_inference_mode_enabled(),
        )  # fmt: skip
        known = kind in self._plans
        found = self._plans.pop(kind, None) or (plan.in_graphs() if known else None)
        self._plans[kind] = found
        if len(self._plans) > _KINDS:
            del self._plans[next(iter(self._plans))]
        return found or plan

    def __reduce__(self) -> tuple[type["GraphCache"], tuple[()]]:
        """Pickle as an empty cache: a copy, or what is loaded, makes its own."""
        return GraphCache, ()


class _Graph:
    """A CUDA graph of what a function does with tensors like these.

    The first call runs the function as ever, and makes what is made once; the second captures it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._results: Tensors = ()  # what they are like, of one element each
        self._replay: Callable[[Tensors], None] | None = None

    def run(self, function: Function, given: Tensors) -> Tensors:
        given = tuple([None if t is None else _readable(t) for t in given])
        if not self._results:
            found = function(*given)
            self._results = tuple(
                [None if t is None else t.new_empty(()).expand(t.shape) for t in found]
            )
            return found
        results = _like(self._results)
        if self._replay is None:
            self._replay = captured(function, given, results, self._device)
        self._replay((*given, *results))
        return results


def _readable(t: Tensor) -> Tensor:
    """Return a tensor, copied unless it lies as one that is captured: contiguous and aligned."""
    t = t.contiguous()
    return t if t.data_ptr() % _ALIGNMENT == 0 else t.clone()


def _like(tensors: Tensors) -> Tensors:
    """Return new tensors like these, but contiguous."""
    return tuple([None if t is None else t.new_empty(t.shape) for t in tensors])


def captured(
    function: Function, given: Tensors, results: Tensors, device: torch.device
) -> Callable[[Tensors], None]:
    """Capture what a function does with tensors like these; return what replays it with others."""
    with torch.cuda.device(device):  # to which what is read of the graph belongs
        # two at a time, so that they have no memory in common
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
    # calls of other threads don't spoil it: NCCL's threads query the device meanwhile
    mode: dict[str, Any] = dict(stream=stream, capture_error_mode="thread_local")
    with passing_capture(), torch.cuda.graph(graph, **mode):
        function(*given, into=results)
    return Capture(graph, given, results)
