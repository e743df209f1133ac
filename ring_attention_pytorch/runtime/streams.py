"""Side streams: kernel calls that overlap, each on a stream other than the current one.

When the last blocks of one call leave multiprocessors idle, the next call begins: for short calls
that is much of their time. A call's inputs must stay in place, and its outputs must not be read,
until the current stream has waited for it: `wait_side_streams`.

Calls for own keys have low priority, as far as their kernel allows. Other ranks wait for the
gradients of the others' keys, and while those are fetched there is compute left to overlap.
"""

import threading
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_OWN, _OTHERS, _LAST = 0, (1, 2), 3
_PRIORITIES = (0, -1, -1, -1)


class _SideStreams:
    """The side streams of one stream."""

    def __init__(self, device: torch.device) -> None:
        self.streams = [torch.cuda.Stream(device, priority=p) for p in _PRIORITIES]
        self.ends = [torch.cuda.Event() for _ in _PRIORITIES]
        self.begins = torch.cuda.Event()
        self.turn = 0


class _Pending(threading.local):
    """Ends of side-stream work that this thread has recorded and not yet waited for."""

    def __init__(self) -> None:
        self.ends: dict[tuple[torch.cuda.Stream, int], torch.cuda.Event] = {}


_side_streams: dict[torch.cuda.Stream, _SideStreams] = {}
_pending = _Pending()
_no_stream = nullcontext()


def side_stream(device: torch.device, own: bool, *memory: Tensor) -> AbstractContextManager[None]:
    """Launch this block's kernels on a side stream, after all earlier work of the current stream.

    The current stream does not wait for them before `wait_side_streams`.

    Args:
        own: whether the calls are for this rank's own keys, at low priority.
        memory: tensors that the calls write. The allocator reuses them only after that.
    """
    return _SideStream(device, own, *memory) if device.type == "cuda" else _no_stream


def side_stream_after_others(device: torch.device) -> AbstractContextManager[None]:
    """Launch on a side stream as `side_stream`, also after the calls for others' keys."""
    return _SideStreamAfterOthers(device) if device.type == "cuda" else _no_stream


def record_use(*tensors: Tensor) -> None:
    """Keep the memory of tensors from side streams until the current stream has read them.

    In a CUDA graph's capture nothing else uses that memory.
    """
    if _pending.ends and tensors[0].is_cuda and not torch.cuda.is_current_stream_capturing():
        current = current_stream(tensors[0].device)
        for t in tensors:
            t.record_stream(current)


def wait_side_streams(device: torch.device) -> None:
    """Make the current stream wait for its side streams."""
    if _pending.ends:
        for end in _returning(device):
            current_stream(device).wait_event(end)


def reset_side_streams(device: torch.device) -> None:
    """Forget side-stream work that a failed call of this thread left behind."""
    if _pending.ends:
        _returning(device)


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the current stream, by the device's index, which takes the host less time."""
    return torch.cuda.current_stream(device.index)


def capturing(device: torch.device) -> bool:
    """True if a CUDA graph is being captured on the device, current or not."""
    if device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device.index):
        return torch.cuda.is_current_stream_capturing()


def _returning(device: torch.device) -> list[torch.cuda.Event]:
    """Remove and return the ends of side streams that the current stream has not waited for."""
    if device.type != "cuda":
        return []
    current = current_stream(device)
    found = [_pending.ends.pop((current, lane), None) for lane in range(len(_PRIORITIES))]
    return [end for end in found if end is not None]


class _SideStream:
    """A context on a side stream, by a third of the host time of `torch.cuda.stream`."""

    def __init__(self, device: torch.device, own: bool = False, *memory: Tensor) -> None:
        self.device, self.own, self.memory = device, own, memory

    def __enter__(self) -> None:
        self.before = torch.cuda.current_device()
        self.current = current = current_stream(self.device)
        if (side := _side_streams.get(current)) is None:
            side = _side_streams[current] = _SideStreams(self.device)
        self.lane = self.choose(side)
        self.stream, self.end = side.streams[self.lane], side.ends[self.lane]
        side.begins.record(current)
        self.stream.wait_event(side.begins)
        torch.cuda.set_stream(self.stream)  # and its device
        if self.memory and not torch.cuda.is_current_stream_capturing():
            for t in self.memory:
                t.record_stream(self.stream)

    def choose(self, side: _SideStreams) -> int:
        if self.own:
            return _OWN
        side.turn = 1 - side.turn
        return _OTHERS[side.turn]

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self.current)
        if self.before != self.device.index:
            torch.cuda.set_device(self.before)
        self.end.record(self.stream)
        _pending.ends[self.current, self.lane] = self.end


class _SideStreamAfterOthers(_SideStream):
    def __enter__(self) -> None:
        super().__enter__()
        for lane in _OTHERS:
            if (end := _pending.ends.get((self.current, lane))) is not None:
                self.stream.wait_event(end)

    def choose(self, side: _SideStreams) -> int:
        return _LAST
