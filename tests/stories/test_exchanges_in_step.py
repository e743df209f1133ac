"""Every function that exchanges, against every other: ranks out of step find out, none is wrong.

One rank swaps two calls, skips one, makes one twice, leaves out a backward or makes two in the
other order. Then some rank raises, and whatever a rank has got until then is right.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import BrokenBarrierError
from types import FrameType
from unittest import mock

import pytest
import torch

import ring_attention_pytorch
from ring_attention_pytorch import RingError
from ring_attention_pytorch.ranks.agreement import agree
from ring_attention_pytorch.ranks.ring import Ring, Steps
from tests.support import threads
from tests.support.exchanging import EXCHANGING, WITHOUT_BACKWARD, Forward, Results
from tests.support.random_series import count, is_late
from tests.support.sampling import grid

PACKAGE = Path(ring_attention_pytorch.__file__).parent
RAISED = ValueError, RingError, TimeoutError, BrokenBarrierError
OTHER = 1  # the rank that is out of step

# what each rank does, and what the other does: calls "a" and "b", each with its backward; "f" is
# the forward of "a" alone, and a number the backward of that "f"
EVENTS = {
    "swapped": (["a", "b"], ["b", "a"]),
    "skipped": (["a", "b"], ["b"]),
    "repeated": (["a", "b"], ["a", "a", "b"]),
    "without backward": (["a", "f", 0, "f", 1], ["a", "f", "f", 1]),
    "other backward": (["f", "f", 0, 1], ["f", "f", 1, 0]),
}
OF_TWO = [event for event, (deeds, _) in EVENTS.items() if "b" in deeds]
OF_ONE = [event for event in EVENTS if event not in OF_TWO]

# where calls begin that no CPU makes, or that are made before all others
ELSEWHERE = {
    "compat/distributed.py": "ranks agree in each call",
    "compat/ring.py": "ranks agree in each call",
    "doctor/parity.py": "the doctor's sums",
    "doctor/trials.py": "the doctor's links",
    "integrations/models.py": "the sum of a batch's tokens, once",
    "nn/generation.py": "sampled tokens, after a cache's",
    "operators.py": "graphs that were traced",
    "inference/relayed_chunk.py": "several machines",
    "recurrent/doubling.py": "more than 16 ranks",
    "recurrent/fla_passes.py": "kernels of fla",
    "recurrent/plan.py": "makes the callers of the others",
    "routing/cross_attention.py": "the mean token of one kind of layer",
    "routing/router.py": "makes the caller of the threshold of `soft_topk`",
    "summaries/cache.py": "a cache of summaries takes a prompt",
}


def out_of_step(event: str, one: str, two: str) -> str:
    """Return how it ended: the name of an error, "wrong ..." or "silent"."""
    for patience in (0.2, 2.0, 20.0, 200.0):
        ready: list[int] = []
        with mock.patch.object(threads, "PATIENCE", patience):
            try:
                threads.run(2, partial(_do, event=event, one=one, two=two, ready=ready))
            except RAISED as error:
                if len(ready) == 2:
                    return type(error).__name__
            except AssertionError as error:
                if not is_late(error):
                    return f"wrong: {error}"
            else:
                return "silent"
    raise AssertionError("they never came so far")


def _do(ring: Ring, event: str, one: str, two: str, ready: list[int]) -> None:
    calls = {"a": EXCHANGING[one](ring)}
    if event in OF_TWO:
        calls["b"] = EXCHANGING[two](ring)
    right = {name: _whole(call) for name, call in calls.items()}
    agree(ring, "all are ready", {})
    ready.append(ring.rank)
    backwards = []
    for deed in EVENTS[event][ring.rank == OTHER]:
        if deed == "f":
            found, backward = calls["a"]()
            backwards.append(backward)
            _check(found, right["a"][: len(found)])
        elif isinstance(deed, int):
            grads = backwards[deed]()
            _check(grads, right["a"][-len(grads) :])
        else:
            _check(_whole(calls[str(deed)]), right[str(deed)])
    agree(ring, "all are done", {})


def _whole(call: Forward) -> Results:
    found, backward = call()
    return [*found, *backward()]


def _check(found: Results, right: Results) -> None:
    for got, want in zip(found, right, strict=True):
        assert torch.equal(got, want), "numbers of another call"


def _walk(events: list[str], pairs: list[tuple[str, str]]) -> dict[str, int]:
    """Return how often each error came."""
    found: dict[str, int] = {}
    for event in events:
        for one, two in pairs:
            end = out_of_step(event, one, two)
            assert "wrong" not in end, (event, one, two, end)
            assert end != "silent", (event, one, two)
            found[end] = found.get(end, 0) + 1
    return found


NAMES = [*EXCHANGING]
NEXT = dict(zip(NAMES, NAMES[1:] + NAMES[:1]))


@grid("name", NAMES, always=6, drawn=6)
def test_swapped_with_the_next_one(name: str) -> None:
    _walk(["swapped"], [(name, NEXT[name])])


@grid(
    "name, event",
    [(name, event) for name in NAMES if name not in WITHOUT_BACKWARD for event in OF_ONE],
    always=8,
    drawn=8,
)
def test_backward_left_out_or_in_another_order(name: str, event: str) -> None:
    _walk([event], [(name, name)])


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_each_against_each(name: str) -> None:
    found = _walk(OF_TWO, [(name, other) for other in NAMES if other != name])
    print(f"{name}: {sum(found.values())} of {len(OF_TWO)} events by {len(NAMES) - 1}: {found}")


@pytest.mark.thorough
@pytest.mark.parametrize("size", [2, 3])
def test_random_series(size: int) -> None:
    """Of how many none was silent is what `python -m tests.support.random_series` prints, too."""
    assert count(40, size, seed=0)["silent"] == 0


def test_every_place_that_begins_calls_is_walked() -> None:
    """A function that exchanges is not forgotten: its file begins a call in none of the walks."""
    begun: set[str] = set()
    begin = Steps.begin

    def watched(steps: Steps, *given: object) -> Steps:
        begun.update(_files(sys._getframe(1)))
        return begin(steps, *given)

    for name in NAMES:
        with mock.patch.object(Steps, "begin", watched):
            threads.run(2, lambda ring, name=name: _whole(EXCHANGING[name](ring)))
    files = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if _begins(path)}
    assert files - begun == {*ELSEWHERE}


def _files(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            yield str(path.relative_to(PACKAGE))
        frame = frame.f_back


def _begins(path: Path) -> bool:
    """True if a file makes a `Caller`, a call of a ring, or one of `comm/collectives.py`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).endswith("comm.collectives"):
            return True
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            made: Callable[[str], bool] = function.endswith
            if function == "Caller" or made("ring.call") or made("together.call"):
                return True
    return False
