"""A world of one process, in which code that shares a sequence is given the whole of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

# what torch.distributed says there
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
in_one_process: list[bool] = []  # the blocks of `one_process` that are open; empty outside


@contextmanager
def one_process() -> Iterator[None]:
    """Make this process the only one, for the code of a block.

    Rings are of this process, whatever group is named. The functions of torch.distributed that say
    who there is, and collectives that are waited for at once, answer as they do alone. All threads
    are inside, since backward runs in threads of its own.
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
