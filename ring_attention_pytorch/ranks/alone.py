"""Run code that shares a sequence in this process alone, on the whole sequence."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

# the results of torch.distributed's functions in a world of one process
_ANSWERS: dict[str, Callable[..., Any]] = {
    "get_rank": lambda *_, **__: 0,
    "get_world_size": lambda *_, **__: 1,
    "all_reduce": lambda *_, **__: None,
    "broadcast": lambda *_, **__: None,
    "barrier": lambda *_, **__: None,
    "all_gather": lambda parts, t, *_, **__: parts[0].copy_(t),
    "all_gather_into_tensor": lambda whole, t, *_, **__: whole.copy_(t.view_as(whole)),
    "reduce_scatter_tensor": lambda part, t, *_, **__: part.copy_(t.view_as(part)),
}
in_one_process: list[bool] = []  # the open blocks of `one_process`


@contextmanager
def one_process() -> Iterator[None]:
    """Make this process the only one, for the code of a block.

    Every ring is this process alone, whichever group is given. torch.distributed's rank and size,
    and its synchronous collectives, act as in a world of one. The block covers all threads, since
    backward runs in threads of its own.
    """
    before = {name: getattr(dist, name) for name in _ANSWERS if hasattr(dist, name)}
    in_one_process.append(True)
    try:
        for name in before:
            setattr(dist, name, _ANSWERS[name])
        yield
    finally:
        in_one_process.pop()
        for name, function in before.items():
            setattr(dist, name, function)
