"""Tensors that outlive the call that makes them, such as tables of a plan's tiles.

torch.compile with CUDA graphs runs a call once with all memory from its graph's pool, and raises if
any of that memory is still in use afterwards. The pool belongs to the thread, so another thread
makes the tensors that stay.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import torch

_T = TypeVar("_T")
_POOLS = "torch._inductor.cudagraph_trees"  # loaded wherever such pools can exist


def outside_graph_pool(make: Callable[[], _T], device: torch.device) -> _T:
    """Run `make` outside of torch.compile's CUDA-graph memory pool, and return its result.

    >>> outside_graph_pool(lambda: torch.tensor([1, 2]), torch.device("cpu"))
    tensor([1, 2])
    """
    if device.type != "cuda" or _POOLS not in sys.modules:
        return make()
    return _thread().submit(_made, make, device).result()


def _made(make: Callable[[], _T], device: torch.device) -> _T:
    with torch.cuda.device(device):
        made = make()
        torch.cuda.current_stream().synchronize()  # readers are on other streams
    return made


@lru_cache(maxsize=1)
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="ring_attention_pytorch")
