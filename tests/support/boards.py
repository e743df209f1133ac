"""Barrier boards and tables of copies on a CPU, for Triton's interpreter."""

import time
from typing import Any

import torch.multiprocessing

from ring_attention_pytorch.comm import fused_copies
from ring_attention_pytorch.runtime.launches import PreparedLaunch
from ring_attention_pytorch.runtime.tape import _preparations


class PlainBuffer:
    """Tables that are made anew each time."""

    @staticmethod
    def table(_: object, make: Any) -> fused_copies.Table:
        return make()


def do(taped: bool, operation: Any, *given: Any) -> None:
    """Launch it, or what a tape makes of it: of others first, to see that it keeps none."""
    if not taped:
        operation(*given)
        return
    prepared = _preparations[operation](*given)
    assert isinstance(prepared, PreparedLaunch)
    prepared(*given)


CPU = torch.device("cpu")


def without_clock() -> None:
    """Let the kernels read this machine's clock: the interpreter has none of a GPU."""
    from ring_attention_pytorch.ranks import _triton_guard

    _triton_guard.globaltimer = time.monotonic_ns
