"""Time calls on one device or on all ranks of a group: what benchmarks of decoding share."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.lib.clock import all_done, slowest_rank, wait
from benchmarks.lib.rings import joined

CALLS = 16  # of a graph
ROUND = 1e5  # microseconds of one
Call = Callable[[int], object]  # of a layer's number


def read_speed(device: torch.device) -> float:
    """Return the bytes a second at which PyTorch reads memory at best.

    Rounds of several reads: single ones, each waited for, leave a GPU at the clock of an idle one.
    """
    x = torch.zeros(1 << (29 if device.type == "cuda" else 22), device=device)
    found = []
    for view in (x, x.view(torch.int64), x.view(torch.int32)):
        for read in (torch.sum, torch.amax):
            took = slowest(lambda r=read, v=view: [r(v) for _ in range(CALLS)], CALLS, 9, device)
            found.append(x.nbytes / (took / 1e6))
    return max(found)


def timed(call: Call, layers: int, device: torch.device) -> float:
    """Return microseconds a call, launched one by one."""
    for i in range(2 * layers):
        call(i % layers)
    return slowest_of_round(lambda calls: [call(i % layers) for i in range(calls)], 100, device)


def graphed(call: Call, layers: int, device: torch.device) -> float:
    """Return microseconds a call, in a graph of several."""
    if device.type == "cpu":
        return float("nan")
    for i in range(layers):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(i % layers)
    replays = slowest_of_round(lambda times: [graph.replay() for _ in range(times)], 10, device)
    return replays / CALLS


def slowest_of_round(run: Callable[[int], object], most: int, device: torch.device) -> float:
    """Return the median of rounds, in microseconds of what is run so many times.

    Args:
        run: does it so many times, without waiting for the device.
        most: times of a round; fewer of what takes long, the same number on all ranks.
        device: what it runs on.
    """
    once = slowest(lambda: run(1), 1, 1, device)
    times = max(1, min(most, round(ROUND / once)))
    return slowest(lambda: run(times), times, 5, device)


def slowest(run: Callable[[], object], calls: int, rounds: int, device: torch.device) -> float:
    """Return the median time of rounds of so many calls, in microseconds a call."""
    found = []
    for _ in range(rounds + 1):
        begin = all_done(device)
        run()
        wait(device)
        found += slowest_rank([(time.perf_counter() - begin) * 1e6 / calls], device)
    return median(found[1:])


def too_much(nbytes: int, device: torch.device) -> str | None:
    """Say that so many bytes more do not fit on each rank; None if they do.

    All ranks say the same, by the one that has least. So none runs out of memory by itself, which
    would leave the others waiting.
    """
    if device.type == "cpu":
        return None
    torch.cuda.empty_cache()
    free = torch.tensor(torch.cuda.mem_get_info(device)[0], device=device)
    if dist.is_initialized():
        dist.all_reduce(free, dist.ReduceOp.MIN)
    return lack(nbytes, int(free.item()))


def lack(nbytes: int, free: int) -> str | None:
    """Say that so many bytes do not fit into nine tenths of what is free; None if they do.

    >>> lack(1 << 30, 1 << 31)
    >>> lack(64 << 30, 32 << 30)
    'needs 64.0 GiB of a GPU, 32.0 are free'
    """
    if nbytes <= 0.9 * free:
        return None
    return f"needs {nbytes / 2**30:.1f} GiB of a GPU, {free / 2**30:.1f} are free"


def group(name: str) -> AbstractContextManager[torch.device]:
    """Return a block in which the processes that torchrun started are a group, on their devices.

    Each must have its own before the group's first exchange: NCCL keeps a communicator for each
    device that a rank has used, and two ranks with different ones wait for each other for ever.
    """
    if dist.is_torchelastic_launched():
        return joined(name)
    return nullcontext(torch.device(name, 0) if name == "cuda" else torch.device(name))


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
