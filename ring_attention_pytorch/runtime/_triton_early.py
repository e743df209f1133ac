"""Kernels that begin before the previous kernel on their stream has ended.

    keys_kernel   |#############______|       the second needs no result of the first: it computes
    queries_kernel            |_______####### on multiprocessors that the first leaves idle

This is programmatic dependent launch (PDL), from Hopper on: the first kernel allows the next one to
begin, which is launched with `launch_pdl`. Before its `gdc_wait` it must not read anything that the
previous launch writes, whichever that is. Later kernels are launched without PDL and wait for the
second kernel only, which therefore must not end before the first.

Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide, "Programmatic Dependent Launch"
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """Allow the next kernel, if launched with PDL, to begin once all programs get here or end.

    Programs that have not begun count, so the next kernel takes no multiprocessor from them.
    """
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def end_after_the_last(EARLY: tl.constexpr):
    """Make a kernel that began early end no sooner than the kernel before it.

    One program waits, the last one to begin: if all did, none would make room for programs that
    have not begun.
    """
    if EARLY:  # noqa: SIM102 - the compiler decides it
        if tl.program_id(0) == tl.num_programs(0) - 1:
            gdc_wait()
