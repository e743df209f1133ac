"""Kernels that begin before the one launched before them on their stream has ended.

    keys_kernel   |#############______|       the second needs nothing of the first: it computes
    queries_kernel            |_______####### where the first has nothing to do any more

That is programmatic dependent launch, from Hopper on: the first kernel lets the next one begin, and
that one is launched with `launch_pdl`. Before it waits for the one before, it must read nothing
that the launch directly before it writes, whichever that is. What comes after is launched as ever,
and waits for the second kernel to end. So the second must not end before the first.

Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide, "Programmatic Dependent Launch"
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """Let the next kernel begin, if it is launched so, when all programs have come here or ended.

    A program that has not begun yet has not come here, so the next kernel takes no room from it.
    """
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def end_after_the_last(EARLY: tl.constexpr):
    """End a kernel that may have begun early no sooner than the kernel before it.

    One program waits, the last one to begin: if all did, none would make room for those that wait
    to begin.
    """
    if EARLY:  # noqa: SIM102 - which the compiler decides
        if tl.program_id(0) == tl.num_programs(0) - 1:
            gdc_wait()
