"""Small tensors that go from the host to a device while it is busy.

A copy from ordinary memory waits until the device has done all that was launched before. A plan's
tables are made in the middle of a step, when that is much.
"""

from functools import lru_cache

import torch
from torch import Tensor

from ring_attention_pytorch.runtime.streams import capturing, current_stream


def uploaded(t: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device, without waiting for the work of the current stream.

    When this returns the copy is done, so any stream may read it; the allocator reuses its memory
    only after the current stream's work at that time.

    >>> uploaded(torch.tensor([1, 2]), torch.device("cpu")).tolist()
    [1, 2]
    """
    if device.type != "cuda" or capturing(device):
        return t.to(device)
    stream = _stream(device)
    with torch.cuda.stream(stream):
        found = t.pin_memory().to(device, non_blocking=True)
    stream.synchronize()
    found.record_stream(current_stream(device))
    return found


@lru_cache(maxsize=64)
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
