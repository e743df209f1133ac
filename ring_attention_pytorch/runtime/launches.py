"""Launches of Triton kernels that cost the host half of what they usually do."""

from typing import Any


class Launch:
    """A Triton kernel that is launched over and over, with arguments of the same kinds.

    Triton looks at all arguments of a launch to find what it has compiled for such, which takes
    15 us of the host; what is compiled is launched in 7. So integers must be annotated in the
    kernel, and not specialized; tensors must be equally aligned. Constants are the kernel's last
    parameters. It is launched on the device for which it was first.
    """

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
