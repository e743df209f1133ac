"""Errors of a ring: their words, who is named, and which a plan mends."""

import gc
import pickle
import threading
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock
from weakref import WeakSet, ref

import pytest

from ring_attention_pytorch import RingError
from ring_attention_pytorch.ranks import failures, notes
from ring_attention_pytorch.ranks import ring as rings
from ring_attention_pytorch.ranks.failures import (
    Disagreement,
    Step,
    known,
    timeout_of,
)
from ring_attention_pytorch.ranks.ring import Ring, Steps, Waits, awaiting
from tests.support import links


def test_after_a_wait_in_vain_nothing_is_agreed_over_that_group_and_others_hear_of_it():
    class Group:
        pass

    group, (mine, theirs, _) = Group(), links.ring_of_links()
    ring = Ring.alone()
    ring.group, ring.size = group, 2
    with pytest.raises(RingError), awaiting(lambda: (ring.steps.now, [1], (group, 0))):
        raise RuntimeError("Timed out waiting 200ms")
    with (
        mock.patch.dict(notes.links_of, {group: mine}),
        pytest.raises(RingError, match="a wait has failed before on this rank; the connections of"),
    ):
        ring.gather_bytes(b"", 1)
    with pytest.raises(failures.Missing, match="Connection closed"):
        theirs.gather(b"", 1)


def test_a_ring_that_no_plan_mends_does_not_say_so():
    for error, mends in ((MemoryError("none left"), True), (in_vain(), False)):
        steps = Steps()
        with pytest.raises(type(error)), steps.begin("forward", 0, None):
            raise error
        with pytest.raises(RingError) as told, steps.begin("forward", 0, None):
            pass
        assert ("once all ranks make a plan" in str(told.value)) == mends
        assert (failures.NEW_GROUP in str(told.value)) != mends


def in_vain() -> RingError:
    return RingError.waiting(Step("forward", 0, 1, 1), [1], RuntimeError("Timed out"))


def test_a_wait_in_vain_is_told_in_words_and_not_in_the_transport_s():
    step = Step("ring attention, forward", 3, 7, 2)
    timeout = "[/src/gloo/buffer.cc:129] Timed out waiting 1500ms for send operation to complete"
    text = str(RingError.waiting(step, [1], RuntimeError(timeout)))
    assert "waited for rank 1, in vain for 1.5 s" in text
    assert "gloo" not in text
    advice = failures._advice(step, {1: "waits in ring attention, forward: call 7 by plan 2"})
    assert "must be given the same plan; this one has number 3" in advice


def test_an_error_names_its_step_and_survives_a_pipe():
    step = Step("ring attention, backward", 3, 7, 2)
    error = RingError.waiting(step, [3, 1, 3], RuntimeError("Timed out. Much more is said."))
    text = str(error)
    assert text.startswith(
        "ring attention, backward: call 7 by plan 3, hop 2: waited for ranks 1, 3"
    )
    assert "failed: Timed out. ranks 1, 3: no word" in text
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.step, again.ranks) == (text, step, (1, 3))


def test_what_is_under_way_when_a_call_fails_lives_on():
    """gloo writes into its buffers whoever waits for them; let go they are anybody's memory."""

    class Message:
        pass

    steps, message = Steps(), Message()
    lives = ref(message)
    steps.under_way.append(message)
    del message
    with pytest.raises(MemoryError), steps.begin("forward", 0, None):
        raise MemoryError
    gc.collect()
    assert lives() is not None
    assert steps.under_way == []


def test_peers_are_told_of_what_fails_in_a_call_and_of_nothing_else():
    with mock.patch("ring_attention_pytorch.ranks.ring.notify_peers") as tell:
        with pytest.raises(Disagreement), Steps().begin("forward", 0, None):
            raise Disagreement
        assert tell.call_count == 0
        with pytest.raises(MemoryError), Steps().begin("forward", 0, None):
            raise MemoryError
        assert tell.call_count == 1


def test_a_group_of_the_process_that_this_one_was_forked_from_is_refused():
    class Group:
        pass

    group = Group()
    inherited = mock.patch("ring_attention_pytorch.ranks.failures.inherited", WeakSet([group]))
    with inherited, pytest.raises(RingError, match="'spawn' or 'forkserver'"):
        known(group)


def test_a_group_waits_as_long_as_the_least_patient_of_its_backends():
    def group(*seconds: float | None) -> SimpleNamespace:
        backends = []
        for each in seconds:
            options = None if each is None else SimpleNamespace(_timeout=timedelta(seconds=each))
            backends.append(SimpleNamespace(options=options))
        return SimpleNamespace(
            _device_types=range(len(backends)), _get_backend=backends.__getitem__
        )

    assert timeout_of(group(7, None, 5)) == timedelta(seconds=5)
    assert timeout_of(group(None)) == timedelta(minutes=30)


def test_a_wait_is_told_again_when_it_has_doubled_and_no_more_when_it_is_over():
    waits, told, now = Waits(0.05), [], [0.0]
    waits.thread = threading.current_thread()  # which looks itself
    step = Step("comparing notes", 0, 0, 0)
    with (
        mock.patch.object(rings, "waits", waits),
        mock.patch.object(rings, "time", SimpleNamespace(monotonic=lambda: now[0])),
        mock.patch.object(rings.logger, "warning", lambda text, *given: told.append(text % given)),
    ):
        with awaiting(lambda: (step, [1], (None, 0))):
            for seconds, count in ((0, 0), (0, 0), (0.06, 1), (0, 1), (0.2, 2), (0, 2)):
                now[0] += seconds
                waits.report()
                assert len(told) == count
        here = f"{step}: waits for rank 1, for 0 s by now, at test_failures.py:"
        assert told[0].startswith(here)
        now[0] += 0.6
        waits.report()
        assert len(told) == 2


@pytest.mark.parametrize("error", [failures.Disagreement, RingError])
def test_what_peers_say_does_not_act_on_a_terminal(error: type[Exception]) -> None:
    said = "rank 1: \x1b]0;title\x07\x9b2J \u202e \ud800\ntwo é"
    want = "rank 1: \\x1b]0;title\\x07\\x9b2J \\u202e \\ud800\ntwo é"
    assert str(error(said)) == want
