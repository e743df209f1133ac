"""Streams and events of a made-up device, which know what came before them."""

import pytest
import torch

from ring_attention_pytorch.runtime import streams

GPU = torch.device("cuda", 0)


class Stream:
    def __init__(self, device: torch.device, priority: int = 0):
        self.device, self.priority, self.before = device, priority, set()

    def wait_event(self, event: "Event") -> None:
        self.before |= event.before


class Event:
    def record(self, stream: Stream) -> None:
        self.before = set(stream.before)


class Machine:
    """A GPU; `does(name)` is a call that the current stream is told of."""

    def __init__(self) -> None:
        self.stream, self.device, self.capturing = Stream(GPU), 0, False

    def set_stream(self, stream: Stream) -> None:
        self.stream, self.device = stream, stream.device.index

    def does(self, name: str) -> Stream:
        self.stream.before.add(name)
        return self.stream


def stood_in(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The machine that there is from now on."""
    found = Machine()
    stand_ins = dict(
        Stream=Stream, Event=Event, set_stream=found.set_stream,
        current_stream=lambda _: found.stream, current_device=lambda: found.device,
        set_device=lambda index: setattr(found, "device", index),
        is_current_stream_capturing=lambda: found.capturing,
    )  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(streams, "_side_streams", {})
    monkeypatch.setattr(streams, "_pending", streams._Pending())
    return found
