"""CUDA graphs of a plan's calls: the host launches each at once, whatever it consists of.

Where tokens are few, Python takes longer to launch the kernels of a ring attention than a GPU takes
to run them. A graph reads and writes the memory with which it was captured. So a call's arguments
are copied there, and its results are copied out: layers may share graphs, and results are like any
others.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ring_attention_pytorch.runtime.streams import capturing, current_stream, passing_capture

Tensors = tuple[Tensor | Any, ...]  # or None
_KINDS = 4  # kinds of batches whose graphs a module keeps


class Graphs:
    """The CUDA graphs of one plan: one for each function of it, and for each kind of arguments.

    `follow` is called before each call. It lets the current stream wait for what other streams do
    with shared memory, and returns which memory that is. Graphs of other shared memory are dropped,
    for the other ranks have left it, too.
    """

    device: torch.device
    follow: Callable[[], Hashable]

    def __init__(self, device: torch.device, follow: Callable[[], Hashable]) -> None:
        self.device, self.follow = device, follow
        self._kept: dict[Hashable, _Graph] = {}
        self._places: dict[Hashable, _Place] = {}
        self._returned: dict[Hashable, _Place] = {}  # those that are of graphs' own memory
        self._shared: Hashable = None
        self._last: torch.cuda.Stream | None = None  # the last that a graph was launched on
        self._layers: dict[int, Any] = {}

    def run(
        self,
        function: Callable[..., Tensors],
        plan: Any,
        *given: Tensor | None,
        saved: bool = False,
    ) -> Any:
        """Return `function(plan, *given)`, by a graph; the tensors given are always like these.

        Functions share places for what they are given: the first tensor has one, and so on.
        `saved` ones are what another function was given and has returned, in this order, and then
        others. What is still in its place is not copied there again.
        """
        if capturing(self.device):
            return function(plan, *given)  # a graph holds what inner graphs would do, not them
        self._follow_streams()
        kind = (
            function, torch.are_deterministic_algorithms_enabled(),
            *(None if t is None else t.dtype for t in given),
        )  # fmt: skip
        if kind not in self._kept:
            self._kept[kind] = _Graph()
        graph = self._kept[kind]
        is_new = not graph.is_captured
        if is_new:
            graph.places = [self._place(i, t) for i, t in enumerate(given)]
        found = graph.run(lambda *at: function(plan, *at), given, self.device, saved)
        if is_new and not saved:
            self._share(graph.results, len(given))
        return found

    def _place(self, number: int, t: Tensor | None) -> "_Place | None":
        """Return where graphs are to read the tensor of that number."""
        if t is None:
            return None
        kind = number, t.shape, t.dtype
        if kind not in self._returned and kind not in self._places:
            self._places[kind] = _Place.like(t)
        return self._returned.get(kind) or self._places[kind]

    def _share(self, results: "Sequence[_Place | None]", first: int) -> None:
        """Let graphs that are captured from now on read results where another one writes them."""
        for number, place in enumerate(results, first):
            if place is not None and place.memory.is_contiguous():  # as all that is read
                kind = number, place.memory.shape, place.memory.dtype
                self._returned[kind] = place
                self._places.pop(kind, None)  # where a first call, not captured, had it

    def of_layer(self, number: int, make: Callable[[], Any]) -> Any:
        """Return the plan of a layer, which has graphs of its own, made when first asked for."""
        if number not in self._layers:
            self._layers[number] = make()
        return self._layers[number]

    def _follow_streams(self) -> None:
        if (shared := self.follow()) != self._shared:
            self._kept.clear()
            self._places.clear()
            self._returned.clear()
            self._shared = shared
        current = current_stream(self.device)
        if self._last not in (None, current):
            current.wait_stream(self._last)
            read = {place for graph in self._kept.values() for place in graph.places if place}
            for place in read.difference(self._returned.values()):
                place.memory.record_stream(current)
        self._last = current


def can_be_captured(plan: Any) -> bool:
    """Tell whether a plan's calls can be CUDA graphs."""
    return plan.device.type == "cuda" and plan.transport.capturable


def with_graphs(plan: Any) -> Any:
    """Return a plan with graphs of its own. Replacing something in it gives a plan without graphs.

    The host launches a graph at once, so calls that overlap cost it nothing more there. Kernels
    that merge by themselves lose by overlapping, so their transport stays.
    """
    transport = plan.transport if plan.kernel.fuses_merge else plan.overlapped or plan.transport
    found = replace(plan) if transport is plan.transport else plan.by(transport)
    object.__setattr__(found, "graphs", Graphs(plan.device, found.transport.follow_stream))
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
        if varies or not can_be_captured(plan):
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


class _Place:
    """Memory that graphs read or write, and which tensor has the same values, if any.

    A tensor is known by its storage: one that is made later at the same address is another.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._holds: tuple[Any, ...] | None = None

    def __reduce__(self) -> tuple[type["_Place"], tuple[Tensor]]:
        """Copy or pickle the memory: a tensor is known in this process, and to one place."""
        return _Place, (self.memory,)

    @classmethod
    def like(cls, t: Tensor) -> "_Place":
        """Make one for tensors like this."""
        with torch.inference_mode(False):
            return cls(torch.empty_like(t, memory_format=torch.contiguous_format))

    def claim(self, t: Tensor) -> bool:
        """Tell whether this tensor is there, as it is now, once.

        After its backward its memory may be another tensor's, which nobody counts as a change.
        """
        known, self._holds = self._holds, None
        return known is not None and known == _identity(t)

    def put(self, t: Tensor, to_be_saved: bool) -> None:
        """Copy a tensor there; only one `to_be_saved` will be known again."""
        self.memory.copy_(t)
        self._holds = _identity(t) if to_be_saved else None

    def take(self, to_be_saved: bool) -> Tensor:
        """Return a copy of what is there."""
        t = self.memory.clone()
        self._holds = _identity(t) if to_be_saved else None
        return t


def _identity(t: Tensor) -> tuple[Any, ...] | None:
    """Return what tells a tensor and its values from all others; None if nothing does."""
    if t.is_inference():
        return None  # whose changes nobody counts
    return StorageWeakRef(t.untyped_storage()), t._version, t.storage_offset(), t.shape, t.stride()


class _Graph:
    """A CUDA graph of what a function does with tensors in these places.

    The first call runs the function as ever, and makes what is made once; the second captures it.
    """

    def __init__(self) -> None:
        self.places: Sequence[_Place | None] = ()
        self.results: Sequence[_Place | None] = ()
        self._warm = False
        self._replay: Callable[[], None] | None = None

    @property
    def is_captured(self) -> bool:
        """Whether its places are fixed."""
        return self._replay is not None

    def run(
        self, function: Callable[..., Tensors], given: Tensors, device: torch.device, saved: bool
    ) -> Tensors:
        for place, t in zip(self.places, given):
            if place is not None and not (saved and place.claim(t)):
                place.put(t, to_be_saved=not saved)
        if self._replay is None:
            read = [None if place is None else place.memory for place in self.places]
            if not self._warm:
                found = function(*read)
                self._warm = True
                return found
            self._replay, results = captured(lambda: function(*read), device)
            self.results = [None if t is None else _Place(t) for t in results]
        self._replay()
        return tuple(None if place is None else place.take(not saved) for place in self.results)


def captured(
    run: Callable[[], Tensors], device: torch.device
) -> tuple[Callable[[], None], Tensors]:
    """Capture what the function does on the device; return what replays it, and its results."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    # calls of other threads don't spoil it: NCCL's threads query the device meanwhile
    mode: dict[str, Any] = dict(stream=stream, capture_error_mode="thread_local")
    with passing_capture(), torch.cuda.graph(graph, **mode):
        results = run()
    return graph.replay, results
