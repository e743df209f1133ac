"""Addresses of tensors in a CUDA graph: found in its nodes' arguments, replaced before a launch.

    a capture   copy(q', x)   kernel(x, k', out')    with tensors q', k', out'
    another     copy(q", x)   kernel(x, k", out")    with other tensors
    a launch    copy(q, x)    kernel(x, k, out)      with a call's tensors q, k, out

A graph's node stores its kernel's arguments by value. Eight bytes of them are an address within a
tensor if in both captures they have the same offset from that tensor's start. A number that only
looks like an address does not move with the tensor: factors by which kernels divide do look so.
Both captures list their nodes in the order of capture.

Before a launch each such address is replaced by the one in the call's tensor. This works for block
descriptors (TMA), too, which begin with an address. Launches in flight are not affected. The calls
are "Graph Management" of CUDA's driver API, and need a driver of CUDA 12.4 or newer.
"""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from ctypes import (
    POINTER,
    Structure,
    addressof,
    byref,
    c_char,
    c_char_p,
    c_int,
    c_size_t,
    c_uint,
    c_uint64,
    c_void_p,
)
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")
_OLDEST = 12040  # the first driver that reports the sizes of a kernel's parameters
_ALIGNMENT = 64  # bytes, of a descriptor
_INVALID_VALUE = 1  # error code: there is no such parameter
# kinds of nodes without tensors: empty, event wait or record, memory allocation or free
_NO_TENSORS = (5, 6, 7, 10, 11)


@cache
def can_be_set() -> bool:
    """True if this driver can set addresses in CUDA graphs."""
    version = c_int()
    try:
        _call("cuDriverGetVersion", byref(version))
    except OSError:  # no NVIDIA driver
        return False
    return version.value >= _OLDEST


class Capture(NamedTuple):
    """A graph that was captured with `keep_graph=True`, and the tensors that it reads and writes.

    The graph uses their memory for nothing else.
    """

    graph: torch.cuda.CUDAGraph
    given: Sequence[Tensor | None]
    results: Sequence[Tensor | None]


class Addresses:
    """The addresses of a capture's tensors, inputs and then results, in the nodes of its graph.

    `other` is a second capture of the call, made while `of` exists, so they share no memory.

    Raises:
        RuntimeError: a node's arguments can't be read, the captures differ, or no node writes a
            result.
    """

    def __init__(self, of: Capture, other: Capture) -> None:
        tensors = [*of.given, *of.results]
        self._now = _addresses(tensors)
        elsewhere = _addresses([*other.given, *other.results])
        spans = []
        for number, (t, first) in enumerate(zip(tensors, self._now)):
            if t is not None:
                end = first + t.numel() * t.element_size()
                spans.append(_Span(number, first, end, elsewhere[number] - first))
        executable = c_void_p(of.graph.raw_cuda_graph_exec())
        self._nodes = []
        found = set[int]()
        twins = _nodes(other.graph.raw_cuda_graph())
        for each, twin in _alike(_nodes(of.graph.raw_cuda_graph()), twins):
            node = _Node(_given(executable, each), _given(None, twin), spans)
            if node.numbers:
                self._nodes.append(node)
                found |= node.numbers
        for span in spans:
            if span.number >= len(of.given) and span.end > span.first and span.number not in found:
                raise _error(f"no node writes result {span.number - len(of.given)}")

    def set(self, tensors: Sequence[Tensor | None]) -> None:
        """Make later launches use these tensors: contiguous, shaped like the captured ones."""
        now, was = _addresses(tensors), self._now
        moved = {number for number, at in enumerate(now) if at != was[number]}
        self._now = [-1] * len(now)  # if the driver refuses one, the next call sets all again
        for node in self._nodes:
            if not moved.isdisjoint(node.numbers):
                node.set(now)
        self._now = now


def _addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in tensors]


def _error(what: str) -> RuntimeError:
    return RuntimeError(f"a call can't be replayed as a CUDA graph: {what}; go without in_graphs")


def _alike(these: Sequence[_T], those: Sequence[_T]) -> Iterable[tuple[_T, _T]]:
    """Pair the items of two captures; raise RuntimeError if the lengths differ."""
    if len(these) != len(those):
        raise _error("two captures of it are not the same")
    return zip(these, those)


class _Span(NamedTuple):
    """A tensor's first and end address, and its distance to the tensor in the other capture."""

    number: int
    first: int
    end: int
    apart: int


class _Given(NamedTuple):
    """A node's arguments, in our memory: their words, and a function that writes them back."""

    what: Sequence[int | None]  # identifies the operation: kind, or kernel and grid
    words: Sequence[Any]  # arrays of 8-byte words
    give: Callable[[], None]


class _Node:
    """A node, and for each word that is an address its tensor and the offset in it."""

    def __init__(self, given: _Given, twin: _Given, spans: Sequence[_Span]) -> None:
        if given.what != twin.what:
            raise _error("two captures of it do not do the same")
        self._found = []
        self._give = given.give
        self.numbers = set[int]()
        for words, others in _alike(given.words, twin.words):
            for at, (word, other) in enumerate(_alike(words, others)):
                for span in spans:
                    if span.first <= word < span.end and other == word + span.apart:
                        self._found.append((words, at, span.number, word - span.first))
                        self.numbers.add(span.number)

    def set(self, now: Sequence[int]) -> None:
        """Make the node use tensors at these addresses."""
        for words, at, number, beyond in self._found:
            words[at] = now[number] + beyond
        self._give()


def _nodes(graph: int) -> list[c_void_p]:
    """Return the nodes of a graph."""
    number = c_size_t()
    _call("cuGraphGetNodes", c_void_p(graph), None, byref(number))
    nodes = (c_void_p * number.value)()
    _call("cuGraphGetNodes", c_void_p(graph), nodes, byref(number))
    return [c_void_p(node) for node in nodes]


def _given(executable: c_void_p | None, node: c_void_p) -> _Given:
    """Copy a node's arguments to our memory, with a function that writes them to `executable`."""
    kind = c_int()
    _call("cuGraphNodeGetType", node, byref(kind))
    if kind.value in _NO_TENSORS:
        return _Given([kind.value], (), lambda: None)
    if kind.value not in _READ:
        raise _error(f"a node of kind {kind.value}, whose memory is unknown")
    found = _READ[kind.value](executable, node)
    return found._replace(what=[kind.value, *found.what])


class _KernelParams(Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("function", c_void_p),
        ("launch", c_uint * 7),  # grid, block, bytes of shared memory
        ("params", POINTER(c_void_p)),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    ]

    def asked(self) -> tuple[str, c_void_p]:
        """Return the prefix of the driver's query functions for this kernel, and its handle."""
        if self.function:
            return "cuFunc", c_void_p(self.function)
        return "cuKernel", c_void_p(self.kernel)


def _of_kernel(executable: c_void_p | None, node: c_void_p) -> _Given:
    params = _KernelParams()
    _call("cuGraphKernelNodeGetParams_v2", node, byref(params))
    sizes = _sizes(params)
    places = [*accumulate([-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes], initial=0)]
    memory = (c_char * (places[-1] + _ALIGNMENT))()
    first = -addressof(memory) % _ALIGNMENT
    pointers = (c_void_p * len(sizes))()
    words = []
    for i, size in enumerate(sizes):
        at = addressof(memory) + first + places[i]
        ctypes.memmove(at, _there(params, i), size)
        pointers[i] = at
        words.append((c_uint64 * (size // 8)).from_buffer(memory, first + places[i]))
    params.params, params.extra = pointers, None
    return _Given(
        [params.function, params.kernel, *params.launch],
        words,
        partial(_call, "cuGraphExecKernelNodeSetParams_v2", executable, node, byref(params)),
    )


def _there(params: _KernelParams, number: int) -> int:
    """Return the address of a parameter's value."""
    if not params.params or (at := params.params[number]) is None:
        raise _error(f"kernel {_name(params)} hides what it is given")
    return at


def _sizes(params: _KernelParams) -> list[int]:
    """Return the size in bytes of each parameter of a kernel."""
    begin, kernel = params.asked()
    ask, offset, size = getattr(_driver(), f"{begin}GetParamInfo"), c_size_t(), c_size_t()
    sizes: list[int] = []
    while (code := ask(kernel, c_size_t(len(sizes)), byref(offset), byref(size))) == 0:
        sizes.append(size.value)
    if code != _INVALID_VALUE:
        raise _error(f"{begin}GetParamInfo: CUDA error {code}")
    return sizes


def _name(params: _KernelParams) -> str:
    begin, kernel = params.asked()
    found = c_char_p()
    _call(f"{begin}GetName", byref(found), kernel)
    return (found.value or b"").decode()


def _of_words(which: str, number: int, executable: c_void_p | None, node: c_void_p) -> _Given:
    """Return the arguments of a node that copies or fills memory: `number` words."""
    words, context = (c_uint64 * number)(), c_void_p()
    _call(f"cuGraph{which}NodeGetParams", node, words)
    _call("cuCtxGetCurrent", byref(context))
    give = partial(_call, f"cuGraphExec{which}NodeSetParams", executable, node, words, context)
    return _Given((), [words], give)


_READ: dict[int, Callable[..., _Given]] = {  # by CUgraphNodeType
    0: _of_kernel,
    1: partial(_of_words, "Memcpy", 25),  # CUDA_MEMCPY3D
    2: partial(_of_words, "Memset", 5),  # CUDA_MEMSET_NODE_PARAMS
}


def _call(name: str, *args: Any) -> None:
    """Call a function of the CUDA driver.

    Raises:
        RuntimeError: the call failed.
        OSError: there is no driver.
    """
    if code := getattr(_driver(), name)(*args):
        raise _error(f"{name}: CUDA error {code}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
