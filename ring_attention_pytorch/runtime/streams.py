"""Calls side by side on a GPU, on streams beside the current one.

Where the last blocks of one call leave multiprocessors idle, the next one begins: for short calls
that is much of their time. What a call reads must stay where it is, and what it makes is read by
nobody, until the current stream has waited for it: `join`.

Calls for own keys give way to the others', as far as their kernel can: other ranks wait for what
those make, and while they read it there is something left to compute.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

_OWN, _OTHERS, _LAST = 0, (1, 2), 3
_PRIORITIES = (0, -1, -1, -1)


class _Lanes:
    """The streams beside one stream."""

    def __init__(self, device: torch.device) -> None:
        self.streams = [torch.cuda.Stream(device, priority=p) for p in _PRIORITIES]
        self.ends = [torch.cuda.Event() for _ in _PRIORITIES]
        self.begins = torch.cuda.Event()
        self.turn = 0


class _Away(threading.local):
    """What this thread told a lane of a stream, and nobody waited for yet."""

    def __init__(self) -> None:
        self.ends: dict[tuple[torch.cuda.Stream, int], torch.cuda.Event] = {}


class _Captures(threading.local):
    """Of whom the graph is that this thread captures."""

    passing = False


_lanes: dict[torch.cuda.Stream, _Lanes] = {}
_captures = _Captures()
_away = _Away()
_nowhere = nullcontext()


def aside(device: torch.device, own: bool, *memory: Tensor) -> AbstractContextManager[None]:
    """What a GPU is told here waits for all that the current stream was told before.

    Nothing waits for it, until somebody joins. `own` are calls for this rank's own keys. They write
    this `memory`, which is not used again before they have, even should they fail midway.
    """
    return _Aside(device, own, *memory) if device.type == "cuda" else _nowhere


def behind(device: torch.device) -> AbstractContextManager[None]:
    """The same, but it waits for the others' calls, too."""
    return _Behind(device) if device.type == "cuda" else _nowhere


def hand_over(*tensors: Tensor) -> None:
    """What went aside made these, on one device, and the current stream will read them.

    So their memory is not used again, on whatever stream, before it has. While a CUDA graph is
    captured nothing else uses it.
    """
    if _away.ends and tensors[0].is_cuda and not torch.cuda.is_current_stream_capturing():
        current = current_stream(tensors[0].device)
        for t in tensors:
            t.record_stream(current)


def join(device: torch.device) -> None:
    """Let the current stream wait for all that went aside from it."""
    for end in _returning(device):
        current_stream(device).wait_event(end)


def forget(device: torch.device) -> None:
    """Let nobody wait for what a call of this thread left that failed."""
    _returning(device)


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """By the number of the device, which takes the host less time."""
    return torch.cuda.current_stream(device.index)


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured there, whichever device is the current one."""
    with torch.cuda.device(device.index):
        return torch.cuda.is_current_stream_capturing()


@contextmanager
def passing_capture() -> Iterator[None]:
    """What this thread captures goes when memory does that is shared: nobody need keep that."""
    _captures.passing = True
    try:
        yield
    finally:
        _captures.passing = False


def captures_for_good(device: torch.device) -> bool:
    """Whether a graph is being captured that may be replayed for as long as there are ranks."""
    return capturing(device) and not _captures.passing


def _returning(device: torch.device) -> list[torch.cuda.Event]:
    if not _away.ends or device.type != "cuda":
        return []
    current = current_stream(device)
    found = [_away.ends.pop((current, lane), None) for lane in range(len(_PRIORITIES))]
    return [end for end in found if end is not None]


class _Aside:
    """By the streams' own methods, which take the host a third of torch.cuda.stream's time."""

    def __init__(self, device: torch.device, own: bool = False, *memory: Tensor) -> None:
        self.device, self.own, self.memory = device, own, memory

    def __enter__(self) -> None:
        self.before = torch.cuda.current_device()
        self.current = current = current_stream(self.device)
        if (lanes := _lanes.get(current)) is None:
            lanes = _lanes[current] = _Lanes(self.device)
        self.lane = self.choose(lanes)
        self.stream, self.end = lanes.streams[self.lane], lanes.ends[self.lane]
        lanes.begins.record(current)
        self.stream.wait_event(lanes.begins)
        torch.cuda.set_stream(self.stream)  # and its device
        if self.memory and not torch.cuda.is_current_stream_capturing():
            for t in self.memory:
                t.record_stream(self.stream)

    def choose(self, lanes: _Lanes) -> int:
        if self.own:
            return _OWN
        lanes.turn = 1 - lanes.turn
        return _OTHERS[lanes.turn]

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self.current)
        if self.before != self.device.index:
            torch.cuda.set_device(self.before)
        self.end.record(self.stream)
        _away.ends[self.current, self.lane] = self.end


class _Behind(_Aside):
    def __enter__(self) -> None:
        super().__enter__()
        for lane in _OTHERS:
            if (end := _away.ends.get((self.current, lane))) is not None:
                self.stream.wait_event(end)

    def choose(self, lanes: _Lanes) -> int:
        return _LAST
