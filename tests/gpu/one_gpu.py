"""Ranks that share memory, as threads of one GPU: each has a stream, and all else is as it is."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ring_attention_pytorch.comm import symmetric_memory
from tests import threads


class Group:
    """The group of one thread's rank, as far as symmetric memory asks."""

    def __init__(self, ring: "GpuRing") -> None:
        self.ring = ring

    def rank(self) -> int:
        return self.ring.rank

    def size(self) -> int:
        return self.ring.size


class GpuRing(threads.ThreadRing):
    """A ring of threads whose ranks find that they share memory."""

    def __init__(self, ring: threads.ThreadRing) -> None:
        super().__init__(ring.hub, ring.rank)
        self.of_rank = Group(self)

    def shared(self) -> tuple[Group, tuple[int, ...]]:
        return self.of_rank, tuple(range(self.size))


def allocate(
    group: Group, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, list[Tensor], None]:
    """Memory of each rank, which is any rank's here."""
    hub, memory = group.ring.hub, torch.zeros(shape, dtype=dtype, device=device)
    torch.cuda.current_stream().synchronize()
    hub.shelves["allocated", group.rank()] = memory
    hub.barrier.wait()
    everyone = [hub.shelves["allocated", rank] for rank in range(group.size())]
    hub.barrier.wait()
    return memory, everyone, None


def ring_of(group: Group) -> GpuRing:
    return group.ring


def wait_for_own(*_: object) -> None:
    torch.cuda.current_stream().synchronize()


@contextmanager
def as_shared(timeout: float) -> Iterator[None]:
    """Make symmetric memory as above; no rank waits for the whole GPU, where others wait for it."""
    patience = timedelta(seconds=timeout)
    with (
        mock.patch.object(symmetric_memory, "allocate", allocate),
        mock.patch.object(symmetric_memory, "Ring", ring_of),
        mock.patch.object(symmetric_memory, "_spaces", {}),
        mock.patch.object(symmetric_memory, "timeout_of", return_value=patience),
        mock.patch.object(torch.cuda, "synchronize", wait_for_own),
    ):
        yield


def run(size: int, timeout: float, rank_main: Callable[[GpuRing], Any]) -> list[Any]:
    """`rank_main(ring)` of each rank, on a stream of its own."""
    started = threading.Barrier(size)

    def main(ring: threads.ThreadRing) -> Any:
        started.wait(60.0)
        with (
            torch.autograd.set_multithreading_enabled(False),
            torch.cuda.stream(torch.cuda.Stream()),
        ):
            found = rank_main(GpuRing(ring))
            torch.cuda.current_stream().synchronize()
            return found

    with as_shared(timeout):
        return threads.run(size, main)[0]
