"""Attempts of all ranks: an error on all of them is a row that says so, one on some ends them all.

A rank that fails alone, for its GPU has less memory say, leaves the others waiting in an exchange
where nobody can tell them. So it ends itself, and torchrun ends the others.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")

PATIENCE = timedelta(seconds=20)  # with others that may fail, too, but later
_numbers = count()  # of attempts, alike on all ranks


class FailedAloneError(RuntimeError):
    """An error that not all ranks have."""


def attempt(work: Callable[[], T]) -> T | str:
    """Return what `work` returns; or, in a line, what went wrong on every rank.

    All ranks call this together.

    Raises:
        FailedAloneError: some ranks have no such error.

    >>> attempt(lambda: 1 + 1), attempt(lambda: 1 // 0)
    (2, 'ZeroDivisionError: integer division or modulo by zero')
    """
    number = next(_numbers)
    try:
        result = work()
    except Exception as error:  # of whatever package
        kind = type(error).__name__
        problem = f"{kind}: {error}".splitlines()[0][:120]
        if others := _without(number, kind):
            raise FailedAloneError(f"failed here, and not on ranks {others}: {problem}") from error
        return problem
    _report(number, "")
    return result


def _report(number: int, kind: str) -> dist.Store | None:
    """Say by what error an attempt ended; return where all ranks say it, if there are several."""
    if not dist.is_initialized():
        return None
    store = dist.PrefixStore("benchmarks", dist.distributed_c10d._get_default_store())
    store.set(f"{number} {dist.get_rank()}", kind)
    return store


def _without(number: int, kind: str) -> list[int]:
    """Say that an attempt failed; return the ranks that have not failed alike by and by."""
    store = _report(number, kind)
    if store is None:
        return []
    keys = [f"{number} {rank}" for rank in range(dist.get_world_size())]
    with suppress(RuntimeError):  # not all have come so far: they wait for this rank
        store.wait(keys, PATIENCE)
    said = [store.get(key).decode() if store.check([key]) else "" for key in keys]
    return [rank for rank, other in enumerate(said) if other != kind]


@contextmanager
def ending_at_once() -> Iterator[None]:
    """End this process by an error: whatever Python would do before may wait for other ranks."""
    try:
        yield
    except Exception:
        sys.excepthook(*sys.exc_info())  # PyTorch's says which rank it is
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
