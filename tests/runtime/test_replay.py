"""When a recording is used, made anew or dropped: with recordings that tell who they are."""

import copy
import pickle
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

from ring_attention_pytorch.runtime.replay import _KINDS, ALWAYS, NEVER, Recordings, Replay

Q = torch.zeros(2, 3)


class Counted:
    """A recording of calls of the same shapes, which counts how often it was run."""

    memory = False
    made: ClassVar[list["Counted"]] = []

    def __init__(self) -> None:
        self.runs = 0
        Counted.made.append(self)

    @staticmethod
    def key(given: tuple) -> tuple | None:
        return None if given[0].dtype == torch.int64 else tuple(t.shape for t in given)

    def run(self, function: Any, owner: Any, given: tuple) -> Any:
        self.runs += 1
        return self, function(owner, *given)


@pytest.fixture(autouse=True)
def _none_made() -> None:
    Counted.made.clear()


def double(owner: object, t: torch.Tensor) -> torch.Tensor:
    return 2 * t


def negate(owner: object, t: torch.Tensor) -> torch.Tensor:
    return -t


def test_calls_of_a_kind_share_a_recording_and_others_have_their_own():
    recordings = Recordings(Counted)
    first, out = recordings.run(double, None, Q + 1)
    assert torch.equal(out, Q + 2)
    assert recordings.run(double, None, Q)[0] is first
    assert recordings.run(negate, None, Q)[0] is not first
    assert recordings.run(double, None, Q[:1])[0] is not first
    assert first.runs == 2


@pytest.mark.parametrize(
    ("setting", "value"),
    [("_get_deterministic_algorithms", True), ("_get_float32_matmul_precision", "another")],
)
def test_global_settings_are_part_of_the_kind(setting, value):
    recordings = Recordings(Counted)
    first, _ = recordings.run(double, None, Q)
    with mock.patch.object(torch._C, setting, return_value=value):
        assert recordings.run(double, None, Q)[0] is not first
    assert recordings.run(double, None, Q)[0] is first


def test_what_is_of_no_kind_is_not_recorded():
    assert torch.equal(Recordings(Counted).run(double, None, Q.long()), Q.long())
    assert Counted.made == []


def test_other_memory_drops_all_recordings():
    memory = ["one"]
    recordings = Recordings(Counted, lambda: memory[0])
    first, _ = recordings.run(double, None, Q)
    memory[0] = "another"
    second, _ = recordings.run(double, None, Q)
    assert second is not first
    memory[0] = "one"  # it was left by the other ranks, too
    assert recordings.run(double, None, Q)[0] not in (first, second)


def test_no_more_than_so_many_kinds_are_kept():
    recordings = Recordings(Counted)
    given = [torch.zeros(n) for n in range(_KINDS + 1)]
    first, _ = recordings.run(double, None, given[0])
    for t in given[1:_KINDS]:
        recordings.run(double, None, t)
    assert recordings.run(double, None, given[0])[0] is first
    recordings.run(double, None, given[_KINDS])
    assert recordings.run(double, None, given[0])[0] is not first


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))]
)
def test_a_copy_has_none(copied):
    recordings = Recordings(Counted)
    first, _ = recordings.run(double, None, Q)
    again = copied(recordings)
    assert again.by is Counted
    assert again.run(double, None, Q)[0] is not first


def test_a_call_can_be_replayed_if_both_of_its_parts_can():
    ways = [Replay(graph, tape) for graph in (False, True) for tape in (False, True)]
    for one in ways:
        assert one.both(ALWAYS)[:2] == one[:2]
        assert one.both(NEVER)[:2] == (False, False)
        for other in ways:
            assert one.both(other)[:2] == (one.graph and other.graph, one.tape and other.tape)
