"""Order among streams, by stand-ins of streams and events that know what came before them."""

import threading

import pytest
import torch

from ring_attention_pytorch.runtime import streams
from tests.support.streams import GPU, Machine, Stream, stood_in


@pytest.fixture
def machine(monkeypatch):
    return stood_in(monkeypatch)


def call(machine: Machine, name: str) -> Stream:
    with streams.side_stream(GPU, own=name.startswith("own")):
        return machine.does(name)


def test_a_call_waits_for_what_was_before_and_nothing_waits_for_it_until_joined(machine):
    main = machine.does("q")
    first, second = call(machine, "own"), call(machine, "others")
    assert machine.stream is main
    assert (first.before, second.before) == ({"q", "own"}, {"q", "others"})
    assert main.before == {"q"}
    streams.wait_side_streams(GPU)
    assert main.before == {"q", "own", "others"}


def test_calls_for_own_keys_give_way_to_the_others(machine):
    for _ in range(2):
        found = [call(machine, name) for name in ("own", "a", "b", "c", "own again")]
        assert [stream.priority for stream in found] == [0, -1, -1, -1, 0]
        assert len(set(found)) == 3
        assert found[1] is not found[2]
        streams.wait_side_streams(GPU)


def test_what_is_behind_waits_for_all_others_whether_there_are_own_keys_or_not(machine):
    for name in ("one", "other"):
        call(machine, name)
    with streams.side_stream_after_others(GPU):
        assert machine.does("sent").before == {"one", "other", "sent"}


def test_what_is_behind_does_not_wait_for_own_keys(machine):
    main = machine.does("q")
    for name in ("own", "one", "own again", "other"):
        call(machine, name)
    machine.does("room")
    with streams.side_stream_after_others(GPU):
        sent = machine.does("sent")
    assert sent.before == {"q", "one", "other", "room", "sent"}
    assert main.before == {"q", "room"}
    streams.wait_side_streams(GPU)
    assert main.before == {"q", "own", "own again", "one", "other", "room", "sent"}


def test_streams_have_lanes_of_their_own(machine):
    here, there = machine.stream, Stream(GPU)
    call(machine, "here")
    machine.set_stream(there)
    call(machine, "there")
    streams.wait_side_streams(GPU)
    assert there.before == {"there"}
    machine.set_stream(here)
    streams.wait_side_streams(GPU)
    assert here.before == {"here"}


def test_an_error_leaves_the_streams_and_the_device_as_they_were(machine):
    main, machine.device = machine.stream, 1
    with pytest.raises(ValueError, match="no"), streams.side_stream(GPU, own=True):  # noqa: PT012
        assert machine.device == 0
        raise ValueError("no")
    assert (machine.stream, machine.device) == (main, 1)


def test_what_a_call_left_that_failed_is_forgotten_by_its_thread_alone(machine):
    main, others = machine.stream, threading.Thread(target=call, args=(machine, "theirs"))
    others.start()
    others.join()
    call(machine, "failed")
    streams.reset_side_streams(GPU)
    streams.wait_side_streams(GPU)
    assert main.before == set()
    call(machine, "own")
    streams.wait_side_streams(GPU)
    assert main.before == {"own"}


def test_what_is_read_is_not_used_again_before_that(machine):
    class Made:
        device, is_cuda, read_by = GPU, True, ()

        def record_stream(self, stream: Stream) -> None:
            self.read_by += (stream,)

    before, after, captured = Made(), Made(), Made()
    streams.record_use(before)
    call(machine, "own")
    streams.record_use(after)
    streams.record_use(torch.empty(1))
    machine.capturing = True
    streams.record_use(captured)
    assert [made.read_by for made in (before, after, captured)] == [(), (machine.stream,), ()]


def test_what_is_written_is_not_used_again_before_that(machine):
    """By a call that fails, too, whose end nobody waits for."""

    class Told:
        written_by = ()

        def record_stream(self, stream: Stream) -> None:
            self.written_by += (stream,)

    before, memory, captured = machine.stream, Told(), Told()
    with pytest.raises(ValueError, match="no"), streams.side_stream(GPU, True, memory):
        raise ValueError("no")
    machine.capturing = True
    with streams.side_stream(GPU, True, captured):
        pass
    assert [stream is before for stream in memory.written_by] == [False]
    assert captured.written_by == ()


def test_elsewhere_nothing_goes_aside():
    with (
        streams.side_stream(torch.device("cpu"), own=True),
        streams.side_stream_after_others(torch.device("cpu")),
    ):
        streams.wait_side_streams(torch.device("cpu"))
