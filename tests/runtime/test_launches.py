"""A prepared launch gives a kernel the tensors of each call, and all else as it was."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch.runtime import launches
from ring_attention_pytorch.runtime.launches import KernelCall, PreparedLaunch

HELD = torch.zeros(2)


class Kernel:
    """Stands for what Triton makes of a function: keeps what it is launched with."""

    arg_names = ("x", "pair", "moved", "held", "n", "COLS", "ROWS")

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **_: Any) -> str:
            self.launched.append(args)
            return "compiled"

        return launch


def described(t: Tensor) -> Any:
    return SimpleNamespace(base=t, shape=t.shape, strides=t.stride(), block_shape=[1, 4])


def call_of(kernel: Kernel, x: Tensor, y: Tensor, moved: Tensor, n: int = 3) -> KernelCall:
    args = (x, (y, x), described(moved), HELD, n)
    return KernelCall(kernel, 7, args, dict(ROWS=16, COLS=32, num_warps=4))


def test_each_call_gives_its_own_tensors() -> None:
    pytest.importorskip("triton")
    kernel, compiled = Kernel(), mock.Mock()
    first = [torch.zeros(2), torch.zeros(2), torch.zeros(2, 4)]
    launch = PreparedLaunch(call_of(kernel, *first), first)
    with mock.patch.object(launches, "_launcher", return_value=compiled) as launcher:
        x, y, moved = second = [torch.zeros(2), torch.zeros(2), torch.zeros(2, 4)]
        launch(*second)  # as Triton launches, with tensors
        launcher.assert_called_once_with("compiled", 7)
        ((got, pair, descriptor, held, n),) = kernel.launched
        assert got is x
        assert pair[0] is y
        assert pair[1] is x
        assert descriptor.base is moved
        assert descriptor.block_shape == [1, 4]
        assert held is HELD
        assert n == 3
        x, y, moved = third = [torch.zeros(2), torch.zeros(2), torch.zeros(2, 4)]
        launch(*third)  # what is compiled, with addresses, and constants in the kernel's order
    ((got, pair, descriptor, *rest),) = [each.args for each in compiled.call_args_list]
    assert (got, pair) == (x.data_ptr(), (y.data_ptr(), x.data_ptr()))
    assert descriptor.base is moved
    assert descriptor.strides == (4, 1)
    assert rest == [HELD.data_ptr(), 3, 32, 16]


def test_tensors_that_begin_alike_are_told_apart() -> None:
    pytest.importorskip("triton")
    kernel, whole = Kernel(), torch.zeros(2, 4)
    first = [whole[0], whole[1], whole]  # the last begins where the first does
    launch = PreparedLaunch(call_of(kernel, *first), first)
    later = [torch.zeros(4), torch.zeros(4), torch.zeros(2, 4)]
    with mock.patch.object(launches, "_launcher"):
        launch(*later)
    assert kernel.launched[0][2].base is later[2]


def test_launches_are_equal_if_all_but_the_given_is() -> None:
    kernel = Kernel()
    given = [[torch.zeros(2), torch.zeros(2), torch.zeros(2, 4)] for _ in "ab"]
    a, b = (PreparedLaunch(call_of(kernel, *each), each) for each in given)
    assert a == b
    assert hash(a) == hash(b)
    assert a != PreparedLaunch(call_of(kernel, *given[0], n=4), given[0])
    assert a != PreparedLaunch(call_of(Kernel(), *given[0]), given[0])
    assert not any(t is x for t in a._call.args for x in given[0])  # which may be freed


# ---- compiled ahead


class Compiled(Kernel):
    """Notes what it is compiled for."""

    def __init__(self, name: str, begun: list[str]) -> None:
        super().__init__()
        self.fn, self.begun = SimpleNamespace(__name__=name), begun

    def warmup(self, *args: Any, grid: tuple[int], **constants: Any) -> None:
        self.begun.append(f"{self.fn.__name__} {len(args)} {grid} {sorted(constants)}")


@launches.operation
def twice(kernel: Compiled, x: Tensor, y: Tensor) -> KernelCall:
    return KernelCall(kernel, 2, (x, y), dict(ROWS=16))


def what_is_held_back_is_compiled_and_not_launched() -> None:
    """By this thread; others' launches go on."""
    triton = pytest.importorskip("triton")
    begun: list[str] = []
    kernels = [Compiled(name, begun) for name in "ab"]
    x = torch.zeros(2)
    with launches.held_back() as calls, ThreadPoolExecutor(1) as other:
        for kernel in kernels:
            twice(kernel, x, x)
        other.submit(twice, kernels[0], x, x).result()
    assert [len(kernel.launched) for kernel in kernels] == [1, 0]
    with mock.patch.object(triton, "JITFunction", Compiled):
        launches.compile_together(calls)
    assert sorted(begun) == ["a 2 (2,) ['ROWS']", "b 2 (2,) ['ROWS']"]
    twice(kernels[1], x, x)
    assert len(kernels[1].launched) == 1


def test_what_is_held_back_is_compiled_and_not_launched() -> None:
    what_is_held_back_is_compiled_and_not_launched()


def kernels_are_compiled_at_the_same_time() -> None:
    """In Triton's own way, where there are several of them; what is held back stays so."""
    triton = pytest.importorskip("triton")
    active: list[bool] = []

    class Watched(Compiled):
        def warmup(self, *args: Any, **_: Any) -> None:
            active.append(_async_compile.active_mode.get() is not None)

    from triton.runtime import _async_compile

    x, kernels = torch.zeros(2), [Watched(name, []) for name in "ab"]

    def run() -> None:
        for kernel in kernels:
            twice(kernel, x, x)

    with mock.patch.object(triton, "JITFunction", Compiled):
        launches.compile_ahead(run)
        assert active == [True, True]
        with launches.held_back() as calls:
            launches.compile_ahead(run)
            run()
        assert len(calls) == 2
    assert active == [True, True]
    assert not any(kernel.launched for kernel in kernels)


def test_kernels_are_compiled_at_the_same_time() -> None:
    kernels_are_compiled_at_the_same_time()


def test_what_is_compiled_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    triton = pytest.importorskip("triton")
    x = torch.zeros(2)
    with mock.patch.object(triton, "JITFunction", Compiled), caplog.at_level("INFO"):
        launches.compile_ahead(lambda: twice(Compiled("forward_kernel", []), x, x))
    assert "compiled forward_kernel" in caplog.text


def test_what_the_interpreter_runs_is_not_compiled() -> None:
    pytest.importorskip("triton")
    x = torch.zeros(2)
    launches.compile_ahead(lambda: twice(Compiled("a", []), x, x))
