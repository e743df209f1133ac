"""Launches of Triton kernels that cost the host half of what they usually do, or less."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class Launch:
    """A Triton kernel that is launched over and over, with arguments of the same kinds.

    Triton looks at all arguments of a launch to find what it has compiled for such, which takes
    15 us of the host or more; what is compiled is launched in 7. So integers must be annotated in
    the kernel, and not specialized; tensors must be of the same dtypes, and equally aligned. It is
    launched on the device for which it was first.

    A kernel's parameters are the arguments of a call, then the `fixed` ones, which are the same in
    all calls, then constants. What is compiled is given addresses: of each tensor it would ask the
    driver.
    """

    kernel: Any
    programs: int

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
        self.kernel, self.programs, self.fixed = kernel, programs, fixed
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
            self._compiled = _launcher(made, self.programs)


def _addressed(args: tuple[Any, ...]) -> list[Any]:
    return [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]


def _launcher(made: Any, programs: int) -> Callable[..., None]:
    """Return what launches a kernel that has run, as Triton does, but without hooks of profilers.

    Those take as long as a third of the launch, each time, if there are none.
    """
    from triton.runtime import driver

    device, stream_of = driver.active.get_current_device(), driver.active.get_current_stream
    run, function, metadata = made.run, made.function, made.packed_metadata

    def launch(*args: Any) -> None:
        run(programs, 1, 1, stream_of(device), function, metadata, None, None, None, *args)

    return launch


class LaunchKind(NamedTuple):
    """All of a launch but its tensors: equal for tensors that are alike in all that counts.

    `arranged` makes the kernel's first arguments of the tensors; `numbers` follow, and constants.
    """

    kernel: Any
    programs: int
    arranged: Callable[..., tuple[Any, ...]]
    numbers: tuple[Any, ...]
    constants: tuple[tuple[str, int], ...]

    def launch(self, *tensors: Tensor) -> Any:
        """Launch it on the current stream, as Triton does; return what is compiled, if anything."""
        given = self.arranged(*tensors)
        return self.kernel[(self.programs,)](*given, *self.numbers, **dict(self.constants))


class PreparedLaunch:
    """A launch that is repeated with tensors like the first ones, on the same device.

    What Triton has compiled for these is launched without looking at the arguments again.
    """

    kind: LaunchKind

    def __init__(self, kind: LaunchKind) -> None:
        self.kind, self._arranged = kind, kind.arranged
        self._numbers = (*kind.numbers, *[value for _, value in kind.constants])
        self._compiled: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PreparedLaunch) and self.kind == other.kind

    def __hash__(self) -> int:
        return hash(self.kind)

    def __call__(self, *tensors: Tensor, **_: object) -> None:
        """Launch it on the current stream; other arguments are in the kind."""
        if self._compiled is not None:
            self._compiled(*self._arranged(*tensors), *self._numbers)
            return
        if (made := self.kind.launch(*tensors)) is not None:  # the interpreter compiles nothing
            self._compiled = made[(self.kind.programs, 1, 1)]
