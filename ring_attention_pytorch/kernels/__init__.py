"""The table of kernels, and the choice among them.

A kernel is one module that satisfies `contract.Kernel`, and one line in `KERNELS`. Kernels
know nothing of ranks or layouts and never import one another.
"""

from ring_attention_pytorch.contract import Case, Kernel
from ring_attention_pytorch.kernels import eager, sdpa, triton

# the fastest first
KERNELS: dict[str, Kernel] = {"sdpa": sdpa, "triton": triton, "eager": eager}


def choose(name: str | None, case: Case) -> Kernel:
    """The kernel of that name; None is the fastest that can do the case.

    Raises:
        ValueError: no such kernel, or it can't do the case. A named kernel never falls back.
    """
    if name is None:
        return next(kernel for kernel in KERNELS.values() if kernel.problem(case) is None)
    if name not in KERNELS:
        raise ValueError(
            f"kernel must be None or one of {', '.join(map(repr, KERNELS))}, got {name!r}"
        )
    if (problem := KERNELS[name].problem(case._replace(named=True))) is not None:
        raise ValueError(
            f"kernel={name!r} {problem}; leave kernel=None to have one chosen that can"
        )
    return KERNELS[name]
