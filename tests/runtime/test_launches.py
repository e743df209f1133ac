"""A prepared launch gives a kernel the tensors of each call, and all else as it was."""

import inspect
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch.runtime import launches
from ring_attention_pytorch.runtime.launches import KernelCall, PreparedLaunch, launch_alike
from ring_attention_pytorch.runtime.tape import Tapes

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
        launcher.assert_called_once_with("compiled", (7,))
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


def test_a_variant_is_of_arguments_that_are_alike() -> None:
    pytest.importorskip("triton")
    kernel, compiled, room = Kernel(), mock.Mock(), torch.zeros(16)
    with mock.patch.object(launches, "_launcher", return_value=compiled):
        for x in (room[:4], room[4:8], room[1:5], room.int(), room[2:6]):
            launch_alike(kernel, 7, x, 3, COLS=32)
        launch_alike(kernel, 8, room, 3, COLS=32)
        launch_alike(kernel, 7, room, 3, COLS=64)
    compiled.assert_called_once_with(room[4:].data_ptr(), 3, 32)
    assert len(kernel.launched) == 6


def test_tensors_that_begin_alike_are_told_apart() -> None:
    pytest.importorskip("triton")
    kernel, whole = Kernel(), torch.zeros(2, 4)
    first = [whole[0], whole[1], whole]  # the last begins where the first does
    launch = PreparedLaunch(call_of(kernel, *first), first)
    later = [torch.zeros(4), torch.zeros(4), torch.zeros(2, 4)]
    with mock.patch.object(launches, "_launcher"):
        launch(*later)
    assert kernel.launched[0][2].base is later[2]


def test_a_live_number_is_read_at_each_launch() -> None:
    pytest.importorskip("triton")

    @dataclass(frozen=True)
    class Counted(launches.Live):
        name: str

        def read(self) -> int:
            return len(launched)

    launched: list[tuple[Any, ...]] = []
    kernel = Kernel()
    kernel.launched, x = launched, torch.zeros(2)
    compiled = mock.Mock(side_effect=lambda *args: launched.append(args))
    kernel.arg_names = ("x", "number")
    calls = [KernelCall(kernel, 7, (x, Counted("a")), {}) for _ in range(2)]
    assert PreparedLaunch(calls[0], [x]) == PreparedLaunch(calls[1], [x])
    calls[0].launch()
    launch = PreparedLaunch(calls[0], [x])
    with mock.patch.object(launches, "_launcher", return_value=compiled):
        for _ in range(3):
            launch(x)
    assert [number for _, number in launched] == [0, 1, 2, 3]


def test_launches_are_equal_if_all_but_the_given_is() -> None:
    kernel = Kernel()
    given = [[torch.zeros(2), torch.zeros(2), torch.zeros(2, 4)] for _ in "ab"]
    a, b = (PreparedLaunch(call_of(kernel, *each), each) for each in given)
    assert a == b
    assert hash(a) == hash(b)
    assert a != PreparedLaunch(call_of(kernel, *given[0], n=4), given[0])
    assert a != PreparedLaunch(call_of(Kernel(), *given[0]), given[0])
    assert not any(t is x for t in a._call.args for x in given[0])  # which may be freed


def test_widths_are_rounded_up_to_a_power_of_two() -> None:
    for width in range(1, 257):
        want = next(size for size in (16, 32, 64, 128, 256) if size >= width)
        assert launches.power_of_2(width) == want


# ---- compiled ahead


class Compiled(Kernel):
    """Notes what it is compiled for, in Triton's own way, and fails if it is told to."""

    def __init__(self, name: str, fails: bool = False) -> None:
        super().__init__()
        self.fn, self.fails = SimpleNamespace(__name__=name), fails
        self.begun: list[tuple[Any, ...]] = []
        self.device_caches: dict[int, tuple[dict[str, Any], None]] = {0: ({}, None)}

    def warmup(self, *args: Any, grid: tuple[int], **constants: Any) -> Any:
        from triton.runtime import _async_compile

        self.begun.append((len(args), grid, *sorted(constants)))
        mode, known = _async_compile.active_mode.get(), self.device_caches[0][0]
        if mode is None:
            return self.made()
        return known.setdefault("kind", mode.submit(id(self), self.made, lambda _: None))

    def made(self) -> str:
        if self.fails:
            raise OSError("no space left on device")
        return "compiled"


@launches.compiled_ahead
def twice(kernel: Compiled, x: Tensor, y: Tensor, rows: int = 16) -> KernelCall:
    return KernelCall(kernel, 2, (x, y), dict(ROWS=rows))


@launches.operation
def meets(kernel: Compiled, x: Tensor) -> KernelCall:
    return KernelCall(kernel, 2, (x,), {})


@pytest.fixture
def kernels_are_triton_s(monkeypatch: pytest.MonkeyPatch) -> None:
    as_triton_s(monkeypatch)


def as_triton_s(patch: pytest.MonkeyPatch) -> None:
    """Kernels of this file pass for those of Triton."""
    patch.setattr(pytest.importorskip("triton"), "JITFunction", Compiled)


def what_is_held_back_is_compiled_and_not_launched(patch: pytest.MonkeyPatch) -> None:
    """By this thread; others' launches go on, and those by which ranks meet."""
    as_triton_s(patch)
    kernels, x = [Compiled(name) for name in "ab"], torch.zeros(2)
    with launches.compile_only() as calls, ThreadPoolExecutor(1) as other:
        for kernel, rows in product(kernels, (16, 16, 32)):
            twice(kernel, x, x, rows)
        other.submit(twice, kernels[0], x, x).result()
        meets(kernels[1], x)
    assert [len(kernel.launched) for kernel in kernels] == [1, 1]
    assert len(calls) == 4  # of those that differ by tensors alone, one
    launches.compile_together([*calls.values()])
    assert [kernel.begun for kernel in kernels] == [[(2, (2,), "ROWS")] * 2] * 2
    twice(kernels[1], x, x)
    assert len(kernels[1].launched) == 2


def test_what_is_held_back_is_compiled_and_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    what_is_held_back_is_compiled_and_not_launched(monkeypatch)


def kernels_are_compiled_at_the_same_time(patch: pytest.MonkeyPatch) -> None:
    """Each waits for all to have begun; what is held back is compiled later."""
    as_triton_s(patch)
    together, x = threading.Barrier(2, timeout=60.0), torch.zeros(2)
    kernels = [Compiled(name) for name in "ab"]
    for kernel in kernels:
        kernel.made = together.wait

    def run() -> None:
        for kernel in kernels:
            twice(kernel, x, x)

    assert launches.compile_ahead(run)
    with launches.compile_only() as calls:
        assert not launches.compile_ahead(run)
        run()
        assert len(calls) == 2
    assert [len(kernel.begun) for kernel in kernels] == [1, 1]
    assert not any(kernel.launched for kernel in kernels)


def test_kernels_are_compiled_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_are_compiled_at_the_same_time(monkeypatch)


def what_can_t_be_compiled_may_be_another_time(patch: pytest.MonkeyPatch) -> None:
    """Triton would keep the error, and the thread would compile nothing any more."""
    as_triton_s(patch)
    kernels, x = [Compiled("a"), Compiled("b", fails=True)], torch.zeros(2)

    def run() -> None:
        for kernel in kernels:
            twice(kernel, x, x)

    assert not launches.compile_ahead(run)
    with launches.compile_only() as calls:
        run()
    with pytest.raises(OSError, match="no space"):
        launches.compile_together([*calls.values()])
    assert not kernels[1].device_caches[0][0]
    assert kernels[0].device_caches[0][0]
    kernels[1].fails = False
    assert launches.compile_ahead(run)


def test_what_can_t_be_compiled_may_be_another_time(monkeypatch: pytest.MonkeyPatch) -> None:
    what_can_t_be_compiled_may_be_another_time(monkeypatch)


def test_a_user_s_own_mode_is_no_matter(kernels_are_triton_s: None) -> None:
    import triton

    x = torch.zeros(2)
    with ThreadPoolExecutor(1) as threads, triton.AsyncCompileMode(threads):
        assert launches.compile_ahead(lambda: [twice(Compiled(name), x, x) for name in "ab"])


def test_what_is_compiled_is_logged(
    kernels_are_triton_s: None, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.zeros(2)
    for names in ("ab", "c"):
        kernels = [Compiled(name, fails=name == "b") for name in names]
        with caplog.at_level("INFO"):
            launches.compile_ahead(lambda: [twice(kernel, x, x) for kernel in kernels])  # noqa: B023
    assert [text.split(",")[0] for text in caplog.messages] == ["a is compiled", "c is compiled"]


def test_what_the_interpreter_runs_is_not_compiled() -> None:
    pytest.importorskip("triton")
    kernel, x = Compiled("a"), torch.zeros(2)
    assert launches.compile_ahead(lambda: twice(kernel, x, x))
    assert not kernel.begun


def test_where_there_is_nothing_to_compile_triton_is_not_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    launches.compile_together([])


# ---- launches of other packages


def test_a_tape_repeats_launches_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """By position and by name, with grids that depend on arguments, and with defaults."""
    jit = pytest.importorskip("triton.runtime.jit")
    launched = []

    class Jit:  # in the place of Triton's, whose `run` needs a GPU
        arg_names = ("x", "out", "n", "BLOCK")
        signature = inspect.signature(lambda x, out, n, BLOCK=4: None)

        def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            bound = self.signature.bind(*args, **{k: v for k, v in options.items() if k != "warps"})
            bound.apply_defaults()
            launched.append(grid(bound.arguments) if callable(grid) else grid)
            bound.arguments["out"].copy_(bound.arguments["x"] + bound.arguments["n"])

        def __getitem__(self, grid: Any) -> Any:
            return partial(self.run, grid=grid, warmup=False)

    monkeypatch.setattr(jit, "JITFunction", Jit)
    kernel, calls = Jit(), []

    def work(owner: object, x: Tensor) -> tuple[Tensor]:
        calls.append(owner)
        out = torch.empty_like(x)
        with launches.launches_recorded():
            kernel[lambda given: (given["BLOCK"], 2)](x, n=3, out=out, warps=1)
        return (out,)

    tapes = Tapes()
    for number in range(6):
        x = torch.full((2,), float(number))
        assert torch.equal(tapes.run(work, None, x)[0], x + 3)
    assert len(calls) == 3
    assert launched == [(4, 2)] * 6
    assert Jit.run.__qualname__.endswith("Jit.run")  # nothing of it is left
