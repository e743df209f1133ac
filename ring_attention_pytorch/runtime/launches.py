"""Launches of Triton kernels that take the host half of Triton's own time, or less."""

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial, wraps
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.progress import say
from ring_attention_pytorch.runtime.tape import opaque, prepared, recording

logger = logging.getLogger("ring_attention_pytorch")


class Launch:
    """A Triton kernel that is launched over and over, with arguments of the same kinds.

    Triton inspects all arguments of a launch to find the compiled variant, which takes 15 us of the
    host or more; launching that variant directly takes 7. Integers must therefore be annotated in
    the kernel and not specialized, and tensors must have the same dtypes and alignment. All
    launches are on the device of the first one.

    A kernel's parameters are the arguments of a call, then the `fixed` ones, which are the same in
    all calls, then constants. The compiled variant gets addresses, because for each tensor it would
    query the driver.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        fixed: tuple[Any, ...] = (),
        num_warps: int = 4,
        num_stages: int | None = None,
        launch_pdl: bool = False,
        **constants: Any,
    ) -> None:
        self.kernel: Any = kernel
        self.programs: int = programs
        self.fixed = fixed
        self.options: dict[str, int] = {"num_warps": num_warps}
        if num_stages is not None:
            self.options["num_stages"] = num_stages
        if launch_pdl:
            self.options["launch_pdl"] = True
        self.constants = constants
        self._compiled: Any = None
        self._rest: tuple[Any, ...] = ()

    def __call__(self, *args: Any) -> None:
        """Launch it on the current stream."""
        if self._compiled is not None:
            self._compiled(*_addressed(args), *self._rest)
            return
        made = self.kernel[(self.programs,)](*args, *self.fixed, **self.constants, **self.options)
        if made is not None:  # the interpreter compiles nothing
            self._rest = (*_addressed(self.fixed), *self.constants.values())
            self._compiled = _launcher(made, (self.programs,))


_ALIGNMENT = 16  # bytes: Triton compiles another variant for addresses that are no multiples


def launch_alike(kernel: Any, programs: int, *args: Any, **options: Any) -> None:
    """Launch a kernel on the current stream by the `Launch` of earlier arguments like these.

    Tensors are alike in device, dtype and alignment, which Triton would find out more slowly.
    """
    kinds: list[Any] = [
        (arg.dtype, arg.data_ptr() % _ALIGNMENT) if isinstance(arg, Tensor) else type(arg)
        for arg in args
    ]
    launch: Any = _launch_of(kernel, programs, args[0].device, *kinds, **options)
    if recording():
        launch = opaque(launch)
    launch(*args)


@lru_cache(maxsize=1024)
def _launch_of(kernel: Any, programs: int, *_: Hashable, **options: Any) -> Launch:
    return Launch(kernel, programs, **options)


def _addressed(args: tuple[Any, ...]) -> list[Any]:
    return [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]


def _launcher(made: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """Return a function that launches a compiled kernel as Triton does, without profiler hooks.

    Hooks take a third of a launch's time, even if none is set.
    """
    from triton.runtime import driver

    device, stream_of = driver.active.get_current_device(), driver.active.get_current_stream
    run, function, metadata = made.run, made.function, made.packed_metadata
    x, y, z = (*grid, 1, 1)[:3]

    def launch(*args: Any) -> None:
        run(x, y, z, stream_of(device), function, metadata, None, None, None, *args)

    return launch


def power_of_2(n: int) -> int:
    """Return the least power of two from 16, the least that `tl.dot` takes, that is at least n.

    >>> [power_of_2(n) for n in (1, 16, 17)]
    [16, 16, 32]
    """
    return max(16, 1 << (n - 1).bit_length())


def can_begin_early(device: torch.device) -> bool:
    """True if a device's kernels can begin before the previous one has ended: `launch_pdl`.

    False if PyTorch fills new memory: the fill could overwrite a kernel's output.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    fills = torch._C._get_deterministic_fill_uninitialized_memory()
    if fills and torch.are_deterministic_algorithms_enabled():
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


class Live:
    """An integer argument that each launch reads anew, also one that a tape repeats."""

    def read(self) -> int:
        raise NotImplementedError


class KernelCall(NamedTuple):
    """A launch of a Triton kernel, with all its arguments."""

    kernel: Any
    programs: int | tuple[int, ...]  # or the grid
    args: Sequence[Any]  # numbers, also `Live` ones, tensors, tuples of them, descriptors
    constants: dict[str, Any]  # the kernel's last parameters, and the compiler's options

    @property
    def grid(self) -> tuple[int, ...]:
        return self.programs if isinstance(self.programs, tuple) else (self.programs,)

    def launch(self) -> Any:
        """Launch it on the current stream by Triton; return the compiled kernel, if any."""
        return self.kernel[self.grid](*map(_now, self.args), **self.constants)

    def compile(self) -> Any:
        """Compile the kernel of a launch unless it is cached; return it, or a future of it."""
        return self.kernel.warmup(*map(_now, self.args), grid=self.grid, **self.constants)


def _now(arg: Any) -> Any:
    return arg.read() if isinstance(arg, Live) else arg


def compile_together(calls: Sequence[KernelCall]) -> None:
    """Compile the kernels of these calls for the current device, all at the same time.

    Each kernel takes a second or two. Compilers run in threads and release the GIL. Triton before
    3.5 compiles one after another. A kernel that fails is compiled again at its launch.
    """
    if not calls:
        return
    import triton

    calls = [call for call in calls if isinstance(call.kernel, triton.JITFunction)]
    if len(calls) < 2 or not hasattr(triton, "AsyncCompileMode"):
        _compile(calls)
        return
    with ThreadPoolExecutor(len(calls)) as threads:
        mode = triton.AsyncCompileMode(threads)
        try:
            contextvars.Context().run(_compile, calls, mode)  # a context without another mode
        finally:
            for call in calls:
                _forget_failed(call.kernel)


def _compile(calls: Sequence[KernelCall], mode: AbstractContextManager[Any] | None = None) -> None:
    begin = time.perf_counter()
    with nullcontext() if mode is None else mode:
        for call in calls:
            made = call.compile()
            if _is_under_way(made):
                made.future.add_done_callback(partial(_log, call, begin))
            else:
                _log(call, begin)


def _log(call: KernelCall, begin: float, future: Future[Any] | None = None) -> None:
    if future is None or future.exception() is None:
        seconds = time.perf_counter() - begin
        say("%s is compiled, %.1f s", call.kernel.fn.__name__, seconds)


def _forget_failed(kernel: Any) -> None:
    """Drop failed compilations from a kernel's caches: Triton would raise their errors forever."""
    for known, *_ in getattr(kernel, "device_caches", {}).values():
        for kind, made in [*known.items()]:
            if _is_under_way(made) and made.future.done() and made.future.exception() is not None:
                del known[kind]


def _is_under_way(made: Any) -> bool:
    """True if Triton has returned a future of a kernel, not the kernel."""
    return isinstance(vars(made).get("future"), Future) if hasattr(made, "__dict__") else False


class _Thread(threading.local):
    """A thread's calls that `compile_only` collects, one of each kind; None outside of it."""

    held: dict[Hashable, KernelCall] | None = None


_thread = _Thread()


@contextmanager
def compile_only() -> Iterator[dict[Hashable, KernelCall]]:
    """Collect the calls that `compiled_ahead` operations would launch in this block and thread.

    Nothing is launched, so outputs are undefined. Of calls with the same constants only the first
    is collected, because it keeps its tensors.
    """
    _thread.held = calls = dict[Hashable, KernelCall]()
    try:
        yield calls
    finally:
        _thread.held = None


def compile_ahead(run: Callable[[], None]) -> bool:
    """Compile the kernels that `run` launches, all together, without launching; True on success.

    False if compilation fails (a launch will raise), and within `compile_only` or a recording.
    """
    if _thread.held is not None or recording():
        return False
    with compile_only() as calls:
        run()
    try:
        compile_together([*calls.values()])
    except Exception:
        logger.debug("kernels are compiled as they are launched", exc_info=True)
        return False
    return True


def operation(
    call: Callable[..., KernelCall], launch: Callable[[KernelCall], object] = KernelCall.launch
) -> Callable[..., None]:
    """Decorate a function (constant, *tensors and constants) -> KernelCall: also launch the call.

    A tape records it as one operation, and replays it without inspecting arguments.
    """

    @opaque
    @wraps(call)
    def launched(constant: object, *tensors: Tensor | Any) -> None:
        with _on(tensors[0]):
            launch(call(constant, *tensors))

    @prepared(launched)
    def _(*given: Any) -> PreparedLaunch:
        return PreparedLaunch(call(*given), given)

    return launched


def compiled_ahead(call: Callable[..., KernelCall]) -> Callable[..., None]:
    """Decorate as `operation` does, but obey `compile_only`.

    Never use it for a kernel with a barrier: ranks that skip the launch would block the others.
    """
    return operation(call, _launch_or_hold)


def _launch_or_hold(call: KernelCall) -> None:
    if _thread.held is None:
        call.launch()
    else:
        _thread.held.setdefault((id(call.kernel), *call.constants.items()), call)


@contextmanager
def launches_recorded() -> Iterator[None]:
    """Let a tape see each launch of Triton in this block, by other packages, too.

    A launch's numbers are constants of the tape: they must depend on its cache key alone.
    """
    if not recording():
        yield
        return
    from triton.runtime import jit

    kernels: Any = jit.JITFunction
    with _recorded_one_by_one:
        run = kernels.run

        def recorded(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            if warmup or not recording():  # another thread's
                return run(kernel, *args, grid=grid, warmup=warmup, **options)
            named = {name: options.pop(name) for name in kernel.arg_names if name in options}
            bound = kernel.signature.bind(*args, **named)
            bound.apply_defaults()
            sizes: Any = grid(bound.arguments) if callable(grid) else grid
            call = KernelCall(kernel, tuple(sizes), [*bound.arguments.values()], options)
            given = [arg for arg in call.args if isinstance(arg, Tensor)]
            return opaque(PreparedLaunch(call, given))(*given)

        kernels.run = recorded
        try:
            yield
        finally:
            kernels.run = run


_recorded_one_by_one = threading.Lock()


def _on(t: Tensor) -> AbstractContextManager[Any]:
    """Make the device of t current: Triton launches there, even if tensors are elsewhere."""
    return torch.cuda.device(t.device) if t.is_cuda else nullcontext()


class _Given(NamedTuple):
    """A placeholder for a tensor argument of a call, by its number."""

    number: int

    def tensor(self, given: Sequence[Tensor | Any]) -> Tensor:
        return given[self.number]

    def address(self, given: Sequence[Tensor | Any]) -> int:
        return given[self.number].data_ptr()


class _LiveSlot(NamedTuple):
    """A placeholder for an integer that each launch reads anew."""

    live: Live

    def tensor(self, given: Sequence[Tensor | Any]) -> Live:
        return self.live

    def address(self, given: Sequence[Tensor | Any]) -> int:
        return self.live.read()


class _Group(NamedTuple):
    """A placeholder for a tuple of such tensors."""

    numbers: tuple[int, ...]

    def tensor(self, given: Sequence[Tensor | Any]) -> tuple[Tensor, ...]:
        return tuple(given[number] for number in self.numbers)

    def address(self, given: Sequence[Tensor | Any]) -> tuple[int, ...]:
        return tuple(given[number].data_ptr() for number in self.numbers)


class _Described(NamedTuple):
    """A placeholder for a block descriptor (TMA) of such a tensor."""

    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]

    def tensor(self, given: Sequence[Tensor | Any]) -> Any:
        from triton.tools.tensor_descriptor import TensorDescriptor

        shape, strides, block = map(list, self[1:])
        return TensorDescriptor(given[self.number], shape, strides, block)

    def address(self, given: Sequence[Tensor | Any]) -> SimpleNamespace:
        """Return the fields of a descriptor that a launch reads, without a descriptor's checks."""
        return SimpleNamespace(
            base=given[self.number], shape=self.shape, strides=self.strides, padding="zero",
            round_f32_to_tf32=False,
        )  # fmt: skip


class PreparedLaunch:
    """A launch that is repeated with tensors of the same kinds, on the same device.

    The compiled kernel is launched without inspecting the arguments again, which takes the host
    100 us if they are many. Arguments that are the call's tensors, or descriptors of them, are
    replaced in each call; other tensors stay the same.
    """

    def __init__(self, call: KernelCall, given: Sequence[Tensor | Any]) -> None:
        numbers: dict[int, int] = {}
        for number, t in enumerate(given):
            if isinstance(t, Tensor):
                numbers.setdefault(id(t), number)
        slots = [_slot(arg, numbers) for arg in call.args]
        moving = [isinstance(slot, _Given | _LiveSlot | _Group | _Described) for slot in slots]
        self._moving = [(at, slots[at]) for at, moves in enumerate(moving) if moves]
        names = call.kernel.arg_names[len(slots) :]
        self._template = [*slots, *(call.constants[name] for name in names)]
        args = [None if moves else arg for moves, arg in zip(moving, call.args)]
        self._call = call._replace(args=args)  # without this call's tensors
        self._compiled: Any = None
        self.kind = call.kernel, call.programs, tuple(slots), tuple(call.constants.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PreparedLaunch) and self.kind == other.kind

    def __hash__(self) -> int:
        return hash(self.kind)

    def __call__(self, *given: Tensor | Any, **_: object) -> None:
        """Launch it on the current stream with these tensors."""
        if self._compiled is None:
            self._look(given)
            return
        args = self._template.copy()
        for at, slot in self._moving:
            args[at] = slot.address(given)
        self._compiled(*args)

    def _look(self, given: Sequence[Tensor | Any]) -> None:
        """Launch it by Triton and keep the compiled kernel; the interpreter has none."""
        args = [*self._call.args]
        for at, slot in self._moving:
            args[at] = slot.tensor(given)
        if (made := self._call._replace(args=args).launch()) is not None:
            self._compiled = _launcher(made, self._call.grid)


def _slot(arg: Any, numbers: dict[int, int]) -> Any:
    """Return an argument's placeholder; a tensor that is not the call's becomes its address.

    `numbers` has the number of each of the call's tensors, by identity.
    """
    if isinstance(arg, Tensor):
        return _Given(numbers[id(arg)]) if id(arg) in numbers else arg.data_ptr()
    if isinstance(arg, Live):
        return _LiveSlot(arg)
    if isinstance(arg, tuple):
        group = [numbers[id(each)] for each in arg if isinstance(each, Tensor)]
        return _Group(tuple(group)) if group else arg
    if hasattr(arg, "block_shape"):
        sizes = arg.shape, arg.strides, arg.block_shape
        return _Described(numbers[id(arg.base)], *map(tuple, sizes))
    return arg
