"""Wait for devices and for ranks, and compare their figures; also in one process alone."""

import time
from collections.abc import Iterable

import torch
import torch.distributed as dist


def wait(device: torch.device | str) -> None:
    """Wait for a GPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def all_done(device: torch.device | str) -> float:
    """Return the time when all ranks have done what they were given."""
    wait(device)
    if dist.is_initialized():
        dist.barrier()
    wait(device)
    return time.perf_counter()


def slowest_rank(figures: Iterable[float], device: torch.device | str) -> list[float]:
    """Return the largest of each figure over all ranks."""
    worst = torch.tensor([*figures], device=device, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.tolist()
