"""Launches of Triton kernels that cost the host half of what they usually do, or less."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class Launch:
    """A Triton kernel that is launched over and over, with arguments of the same kinds.

    Triton looks at all arguments of a launch to find what it has compiled for such, which takes
    15 us of the host; what is compiled is launched in 7. So integers must be annotated in the
    kernel, and not specialized; tensors must be equally aligned. Constants are the kernel's last
    parameters. It is launched on the device for which it was first.
    """

    kernel: Any
    programs: int

    def __init__(
        self,
        kernel: Any,
        programs: int,
        num_warps: int = 4,
        num_stages: int | None = None,
        launch_pdl: bool = False,
        **constants: Any,
    ) -> None:
        self.kernel, self.programs = kernel, programs
        self.options: dict[str, int] = {"num_warps": num_warps}
        if num_stages is not None:
            self.options["num_stages"] = num_stages
        if launch_pdl:
            self.options["launch_pdl"] = True
        self.constants = constants
        self._compiled: Any = None

    def __call__(self, *args: Any) -> None:
        """Launch it on the current stream."""
        if self._compiled is not None:
            self._compiled(*args, *self.constants.values())
            return
        made = self.kernel[(self.programs,)](*args, **self.constants, **self.options)
        if made is not None:  # the interpreter compiles nothing
            self._compiled = made[(self.programs, 1, 1)]


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
