"""Calls side by side on a GPU, on streams beside the current one.

Where the last blocks of one call leave multiprocessors idle, the next one begins: for short calls
that is much of their time. What a call reads must stay where it is, and what it makes is read by
nobody, until the current stream has waited for it: `join`.

The first call gives way to those that follow, as far as its kernel can: what others wait for is
among those, and while they read it there is something left to compute.
"""

from contextlib import AbstractContextManager, nullcontext

import torch

_FIRST, _BESIDE, _LAST = 0, (1, 2), 3


class _Lanes:
    """The streams beside one stream.

    They are its own: memory that was allocated on one of them, and read on that stream, is used
    again only after all that the stream was told before.
    """

    def __init__(self, device: torch.device) -> None:
        priorities = (0, -1, -1, -1)
        self.streams = [torch.cuda.Stream(device, priority=p) for p in priorities]
        self.ends = [torch.cuda.Event() for _ in priorities]
        self.begins = torch.cuda.Event()
        self.turn = 0


_lanes: dict[torch.cuda.Stream, _Lanes] = {}
_away: dict[tuple[torch.cuda.Stream, int], torch.cuda.Event] = {}  # what nobody waited for yet
_nowhere = nullcontext()


def aside(device: torch.device) -> AbstractContextManager[None]:
    """What a GPU is told here waits for all that it was told before, and nothing waits for it."""
    return _Aside(device) if device.type == "cuda" else _nowhere


def behind(device: torch.device) -> AbstractContextManager[None]:
    """The same, but it waits for what went aside, too, except for the first call."""
    return _Behind(device) if device.type == "cuda" else _nowhere


def join(device: torch.device) -> None:
    """Let the current stream wait for all that went aside from it."""
    if not _away or device.type != "cuda":
        return
    current = torch.cuda.current_stream(device.index)
    for lane in (_FIRST, *_BESIDE, _LAST):
        if (end := _away.pop((current, lane), None)) is not None:
            current.wait_event(end)


class _Aside:
    """By the streams' own methods, which take the host a third of torch.cuda.stream's time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.before = torch.cuda.current_device()
        self.current = current = torch.cuda.current_stream(self.device.index)
        if (lanes := _lanes.get(current)) is None:
            lanes = _lanes[current] = _Lanes(self.device)
        self.lane = self.choose(lanes)
        self.stream, self.end = lanes.streams[self.lane], lanes.ends[self.lane]
        lanes.begins.record(current)
        self.stream.wait_event(lanes.begins)
        torch.cuda.set_stream(self.stream)  # and its device

    def choose(self, lanes: _Lanes) -> int:
        if (self.current, _FIRST) not in _away:
            return _FIRST
        lanes.turn = 1 - lanes.turn
        return _BESIDE[lanes.turn]

    def __exit__(self, *_: object) -> None:
        self.end.record(self.stream)
        _away[self.current, self.lane] = self.end
        torch.cuda.set_stream(self.current)
        if self.before != self.device.index:
            torch.cuda.set_device(self.before)


class _Behind(_Aside):
    def __enter__(self) -> None:
        super().__enter__()
        for lane in _BESIDE:
            if (end := _away.get((self.current, lane))) is not None:
                self.stream.wait_event(end)

    def choose(self, lanes: _Lanes) -> int:
        return _LAST
