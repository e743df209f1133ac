"""A prepared launch gives a kernel the tensors of each call, and all else as it was."""

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
