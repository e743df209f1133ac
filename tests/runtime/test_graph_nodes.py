"""Addresses in nodes of a CUDA graph, with a stand-in for the driver that holds them."""

import ctypes
import struct
from collections.abc import Iterator, Sequence
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch.runtime import graph_nodes
from ring_attention_pytorch.runtime.graph_nodes import Addresses, Capture

KERNEL, COPY, FILL, HOST, EVENT = 0, 1, 2, 3, 7


class Driver:
    """Graphs are numbers, of lists of nodes; a node is its kind, and the bytes of what it is given:
    of each parameter, if it is a kernel."""

    def __init__(self) -> None:
        self.nodes: dict[int, tuple[int, list[bytes]]] = {}
        self.graphs: dict[int, list[int]] = {}
        self.told: list[int] = []
        self.hidden, self.refuses, self.version = False, 0, 13000
        self.launch: Iterator[int] = repeat(3)
        self._kept: list[Any] = []

    def graph(self, *nodes: tuple[int, list[bytes]]) -> SimpleNamespace:
        number = 1000 * (1 + len(self.graphs))
        self.graphs[number] = [number + 1 + at for at in range(len(nodes))]
        self.nodes.update(zip(self.graphs[number], nodes))
        return SimpleNamespace(raw_cuda_graph=lambda: number, raw_cuda_graph_exec=lambda: number)

    def cuDriverGetVersion(self, found: Any) -> int:
        found._obj.value = self.version
        return 0

    def cuGraphGetNodes(self, graph: Any, nodes: Any, number: Any) -> int:
        number._obj.value = len(self.graphs[graph.value])
        for at, node in enumerate(self.graphs[graph.value] if nodes is not None else ()):
            nodes[at] = node
        return 0

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        kind._obj.value = self.nodes[node.value][0]
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: Any, params: Any) -> int:
        blobs = [ctypes.create_string_buffer(each, len(each)) for each in self.nodes[node.value][1]]
        pointers = (ctypes.c_void_p * len(blobs))(*map(ctypes.addressof, blobs))
        self._kept += [blobs, pointers]
        which, number = params._obj, node.value % 1000
        which.launch[0] = next(self.launch)
        which.function, which.kernel = (number, None) if number % 2 else (None, number)
        self.last = node.value
        if not self.hidden:
            which.params = pointers
        return 0

    def cuFuncGetParamInfo(self, of: Any, at: Any, offset: Any, size: Any) -> int:
        assert of.value == self.last % 1000  # the same in all graphs
        sizes = [len(each) for each in self.nodes[self.last][1]]
        if at.value == len(sizes):
            return 1
        offset._obj.value, size._obj.value = sum(sizes[: at.value]), sizes[at.value]
        return 0

    cuKernelGetParamInfo = cuFuncGetParamInfo

    def cuFuncGetName(self, name: Any, _: Any) -> int:
        name._obj.value = b"forward_kernel"
        return 0

    cuKernelGetName = cuFuncGetName

    def cuGraphExecKernelNodeSetParams_v2(self, graph: Any, node: Any, params: Any) -> int:
        assert not params._obj.extra
        blobs = self.nodes[node.value][1]
        at = params._obj.params
        assert all(pointer % 64 == 0 for pointer in at[: len(blobs)])  # as a descriptor has to be
        blobs[:] = [ctypes.string_at(at[i], len(each)) for i, each in enumerate(blobs)]
        return self._told(graph, node)

    def cuGraphMemcpyNodeGetParams(self, node: Any, words: Any) -> int:
        ctypes.memmove(words, self.nodes[node.value][1][0], ctypes.sizeof(words))
        return 0

    cuGraphMemsetNodeGetParams = cuGraphMemcpyNodeGetParams

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = 77
        return 0

    def cuGraphExecMemcpyNodeSetParams(self, graph: Any, node: Any, words: Any, at: Any) -> int:
        assert at.value == 77
        self.nodes[node.value][1][0] = bytes(words)
        return self._told(graph, node)

    cuGraphExecMemsetNodeSetParams = cuGraphExecMemcpyNodeSetParams

    def _told(self, graph: Any, node: Any) -> int:
        assert node.value in self.graphs[graph.value]
        self.told.append(node.value)
        return self.refuses


def words(*values: int) -> bytes:
    return struct.pack(f"{len(values)}Q", *values)


def call(q: int, k: int, out: int) -> list[tuple[int, list[bytes]]]:
    """The nodes of a call with tensors at these addresses."""
    return [
        (COPY, [words(*[0] * 6, k, *[0] * 10, 5 << 40, *[0] * 7)]),
        (EVENT, []),
        (KERNEL, [
            words(q), struct.pack("i", 7), words(3, out + 64, 9), words(q + 256, *[5] * 15),
        ]),
        (KERNEL, [words(1 << 33)]),
        (KERNEL, [words(k + 8, out)]),
        (FILL, [words(out, 0, 0, 64, 1)]),
    ]  # fmt: skip


def tensors() -> list[Tensor | None]:
    """q, nothing, k and out."""
    memory = [torch.zeros(256) for _ in range(3)]
    return [memory[0], None, *memory[1:]]


def of(given: Sequence[Tensor | None]) -> list[int]:
    return [t.data_ptr() for t in given if t is not None]


def captures(driver: Driver, *, looks_like: int = 0) -> tuple[Capture, Capture]:
    """Two captures of one call, and a number in both that looks like an address in the first."""
    both = []
    for made in (tensors(), tensors()):
        nodes = call(*of(made))
        first = both[0].given if both else made
        nodes[3] = (KERNEL, [words(first[0].data_ptr() + looks_like)])
        both.append(Capture(driver.graph(*nodes), made[:3], made[3:]))
    return both[0], both[1]


def with_driver(patch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    patch.setattr(graph_nodes, "_driver", lambda: driver)
    graph_nodes.can_be_set.cache_clear()
    return driver


def all_that_is_an_address_is_set(patch: pytest.MonkeyPatch) -> None:
    """In copies, in what is filled, in parameters, within structures and descriptors; no more."""
    driver = with_driver(patch)
    this, other = captures(driver, looks_like=64)
    number = driver.nodes[1004][1][0]
    addresses = Addresses(this, other)
    for _ in range(2):
        given = tensors()
        addresses.set(given)
        want = call(*of(given))
        want[3] = (KERNEL, [number])
        assert [driver.nodes[node] for node in driver.graphs[1000]] == want
        assert sorted(driver.told) == [1001, 1003, 1005, 1006]
        driver.told.clear()
    assert driver.nodes[2003] == call(*of([*other.given, *other.results]))[2]


def test_all_that_is_an_address_is_set(monkeypatch):
    all_that_is_an_address_is_set(monkeypatch)


def nodes_of_what_stays_are_left_alone(patch: pytest.MonkeyPatch) -> None:
    """And get all their addresses where one of them moves."""
    driver = with_driver(patch)
    both = captures(driver)
    addresses = Addresses(*both)
    q, _, _, out = given = tensors()
    addresses.set(given)
    driver.told.clear()
    addresses.set(given)
    assert not driver.told
    other = torch.zeros(256)
    addresses.set([q, None, other, out])
    assert sorted(driver.told) == [1001, 1005]
    assert driver.nodes[1005][1] == [words(other.data_ptr() + 8, out.data_ptr())]


def test_nodes_of_what_stays_are_left_alone(monkeypatch):
    nodes_of_what_stays_are_left_alone(monkeypatch)


def what_can_not_be_read_is_refused(patch: pytest.MonkeyPatch) -> None:
    """Never left at the address that it had."""
    driver = with_driver(patch)
    this, other = captures(driver)
    for nodes, wrong in (
        (call(1, 2, 3)[:-1], "not the same"),
        ([*call(1, 2, 3)[:4], (KERNEL, [words(2)]), call(1, 2, 3)[5]], "not the same"),
        (call(1, 2, 3)[::-1], "do not do the same"),
    ):
        with pytest.raises(RuntimeError, match=f"{wrong}; go without in_graphs"):
            Addresses(this, other._replace(graph=driver.graph(*nodes)))
    driver.launch = iter(range(99))
    with pytest.raises(RuntimeError, match="do not do the same"):
        Addresses(this, other)
    driver.launch = repeat(3)
    driver.hidden = True
    with pytest.raises(RuntimeError, match="kernel forward_kernel hides"):
        Addresses(this, other)
    driver.hidden = False
    for nodes, wrong in (([(HOST, [])], "a node of kind 3"), ([], "no node writes result 0")):
        both = [each._replace(graph=driver.graph(*nodes)) for each in (this, other)]
        with pytest.raises(RuntimeError, match=wrong):
            Addresses(*both)
    patch.setattr(driver, "cuFuncGetParamInfo", lambda *_: 400)
    with pytest.raises(RuntimeError, match="cuFuncGetParamInfo: CUDA error 400"):
        Addresses(this, other)


def test_what_can_not_be_read_is_refused(monkeypatch):
    what_can_not_be_read_is_refused(monkeypatch)


def what_the_driver_refuses_is_said(patch: pytest.MonkeyPatch) -> None:
    """And then all nodes are told again, whichever were told already."""
    driver = with_driver(patch)
    both = captures(driver)
    addresses, given, others = Addresses(*both), tensors(), tensors()
    addresses.set(given)
    for refused in (others, others, given):
        driver.refuses = 1
        with pytest.raises(RuntimeError, match="CUDA error 1"):
            addresses.set(refused)
        driver.refuses = 0
    addresses.set(given)
    want = call(*of(given))
    assert [driver.nodes[1000 + at] for at in (1, 3, 5, 6)] == [want[at] for at in (0, 2, 4, 5)]


def test_what_the_driver_refuses_is_said(monkeypatch):
    what_the_driver_refuses_is_said(monkeypatch)


@pytest.mark.parametrize(("version", "new"), [(12030, False), (12040, True), (13000, True)])
def test_older_drivers_tell_nothing(monkeypatch, version, new):
    with_driver(monkeypatch).version = version
    assert graph_nodes.can_be_set() is new
    graph_nodes.can_be_set.cache_clear()


def test_where_there_is_no_driver_nothing_can_be_set(monkeypatch):
    def none() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(graph_nodes, "_driver", none)
    graph_nodes.can_be_set.cache_clear()
    assert not graph_nodes.can_be_set()
    graph_nodes.can_be_set.cache_clear()
