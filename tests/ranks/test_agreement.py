"""Comparing notes: all ranks go on, or all of them say the same."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from beartype import beartype
from beartype.roar import BeartypeCallHintParamViolation
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_attention_pytorch import apply_rotary_pos_emb
from ring_attention_pytorch.arguments import check_least
from ring_attention_pytorch.ranks import notes
from ring_attention_pytorch.ranks.agreement import (
    MustMatch,
    agree,
    check_same_call,
    error_of,
    report_to_group,
    report_to_ring_of,
    reporting,
    typed,
)
from ring_attention_pytorch.ranks.failures import printable
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.telling import said

values = (
    st.none() | st.booleans() | st.integers(0, 3) | st.text(max_size=3) | st.lists(st.booleans())
)


def test_numbers_of_all_ranks_come_back_in_order():
    got, _ = threads.run(4, lambda r: agree(r, "here", {"x": 1}, {"n": 10 + r.rank}))
    assert got == [[{"n": 10}, {"n": 11}, {"n": 12}, {"n": 13}]] * 4


@settings(deadline=None, max_examples=60)
@given(st.lists(values, min_size=1, max_size=5))
def test_ranks_go_on_if_and_only_if_they_have_the_same(found):
    texts = said(len(found), lambda ring: agree(ring, "here", {"x": found[ring.rank]}))
    assert len(set(texts)) == 1
    # True is not 1 and None is not absent: compare as what is written
    assert (texts[0] is None) == (len({repr(v) for v in found}) == 1)


def test_the_error_names_the_argument_the_ranks_and_the_values():
    texts = said(4, lambda ring: agree(ring, "here", {"a": 0, "window": 8 - (ring.rank == 2)}))
    got = "got 8 on ranks 0, 1, 3, 7 on rank 2"
    told = f"here: window must be the same on every rank, {got}; pass the same on all"
    assert texts == [told] * 4


def test_a_thing_that_only_some_ranks_have_differs():
    texts = said(3, lambda ring: agree(ring, "here", {"extra": 1} if ring.rank == 2 else {}))
    assert len(set(texts)) == 1
    assert "extra must be the same" in texts[0]
    assert "null on ranks 0, 1, 1 on rank 2" in texts[0]


def test_a_problem_of_one_rank_is_raised_on_all_and_names_it():
    def call(ring: Ring) -> None:
        agree(ring, "here", {}, check=ValueError("a bad thing") if ring.rank == 1 else None)

    assert said(3, call) == ["here: a bad thing (on rank 1)"] * 3


def test_problems_that_all_ranks_have_are_told_once_and_others_with_their_ranks():
    bad = ValueError("bad")
    assert said(3, lambda ring: agree(ring, "here", {}, check=bad)) == ["here: bad"] * 3
    texts = said(3, lambda r: agree(r, "here", {}, check=ValueError(f"bad {r.rank > 0}")))
    assert texts == ["here: bad False (on rank 0); bad True (on ranks 1, 2)"] * 3


def test_a_problem_comes_before_a_difference():
    def call(ring: Ring) -> None:
        agree(ring, "here", {"x": ring.rank}, check=ValueError("bad") if ring.rank == 1 else None)

    assert said(2, call) == ["here: bad (on rank 1)"] * 2


@pytest.mark.parametrize("character", ["x", "é", "漢", "🦙", '"', "\\", "\0", "\ud800"])
def test_what_is_wrong_may_be_said_in_any_script_and_at_any_length(character):
    problem = character * 99_999

    def call(ring: Ring) -> None:
        wrong = ValueError(problem) if ring.rank else None
        agree(ring, "here", {"layout": problem}, check=wrong)

    (told,) = {*said(2, call)}
    assert 1000 < len(told) < 3000 * len(printable(character))
    assert told.endswith("(on rank 1)")
    told.encode()


def test_notes_are_of_any_length():
    same = {f"dropout of layer {i}": i / 1000 for i in range(700)}
    got, _ = threads.run(3, lambda r: agree(r, "here", same, {"n": r.rank}))
    assert got == [[{"n": 0}, {"n": 1}, {"n": 2}]] * 3


def test_what_differs_late_differs():
    texts = said(2, lambda ring: agree(ring, "here", {"x": "a" * 5000 + str(ring.rank)}))
    assert "x must be the same on every rank" in texts[0]
    assert texts[0] == texts[1]


def test_things_that_json_does_not_know_are_compared_as_text():
    assert said(2, lambda ring: agree(ring, "here", {"dtype": torch.float32})) == [None] * 2
    texts = said(2, lambda r: agree(r, "here", {"dtype": (torch.half, torch.double)[r.rank]}))
    assert "torch.float16" in texts[0]
    assert "torch.float64" in texts[0]


def test_a_digest_that_is_unread_is_compared_once():
    words = "the batch before.* got 5 on ranks 0, 1, 6 on rank 2"

    def call(ring: Ring) -> None:
        ring.steps.unread = SimpleNamespace(for_note=lambda: 5 + (ring.rank == 2))
        with pytest.raises(ValueError, match=words):
            agree(ring, "here", {"x": 1})
        agree(ring, "here", {"x": 1})

    assert said(3, call) == [None] * 3


def test_a_ring_of_one_agrees_with_itself():
    assert agree(Ring.alone(), "here", {"x": 1}, {"n": 3}) == [{"n": 3}]
    with pytest.raises(ValueError, match=r"^here: bad$"):
        agree(Ring.alone(), "here", {}, check=ValueError("bad"))


FOREIGN = {
    "of another library": b"what else goes over a group" * 200,
    "too short": b"?",
    "no JSON": b"{",
    "too deep": b"[" * 200_000,
    "a list": b"[]",
    "no names": b"{}",
    "other kinds": b'{"everywhere": 1, "same": {}, "own": {}, "step": 0, "problem": null}',
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_notes_that_are_none_are_an_error_that_names_the_rank(kind):
    def call(ring: threads.ThreadRing) -> None:
        if ring.rank != 1:
            agree(ring, "here", {"x": 1})
        elif kind in ("of another library", "too short"):
            ring.gather_bytes(FOREIGN[kind], 4096)
            raise ValueError
        else:
            ring.gather_notes("here", FOREIGN[kind])
            raise ValueError

    first, _, third = said(3, call)
    assert first == third
    assert "rank 1" in first


MALFORMED = {
    "endless": (
        lambda _: notes._HEAD.pack(notes._MARK, 4, 1 << 60) + b"here",
        "has 1152921504606846976 bytes, more than",
    ),
    "of devices": (
        lambda _: notes._HEAD.pack(notes._MARK, 4, 3) + b"here" + b"old",
        "does not say how its devices are",
    ),
    "other numbers": (
        lambda ring: whole_note(ring, b'{"k": 1}'), "numbers: n on ranks 0, 2, k on rank 1"
    ),
    "no numbers": (lambda ring: whole_note(ring, b'{"n": "many"}'), "invalid literal for int"),
    "numbers without names": (lambda ring: whole_note(ring, b"[3]"), "has no attribute"),
}  # fmt: skip


def whole_note(ring: threads.ThreadRing, own: bytes) -> bytes:
    """The first message of a note like the others', but for the numbers of its rank."""
    step = ring.steps.notes - 1  # before these
    told = b"\0%d %d null\n%s\n%s" % (step, ring.size, MustMatch({"x": 1}).text, own)
    return notes._HEAD.pack(notes._MARK, 4, len(told)) + b"here" + told


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_note_is_refused_by_all_with_the_rank_that_sent_it(kind):
    message, text = MALFORMED[kind]

    def call(ring: threads.ThreadRing) -> None:
        if ring.rank != 1:
            agree(ring, "here", {"x": 1}, {"n": 5})
        ring.steps.compare("here")
        ring.gather_bytes(message(ring).ljust(notes.FIRST, b"\0"), notes.FIRST)
        raise ValueError

    first, _, third = said(3, call)
    assert first == third
    assert text in first
    assert "rank 1" in first
    assert "run the same version of this library" in first


def test_a_wrong_type_within_a_call_is_not_taken_for_one_of_its_own():
    told = []

    @beartype
    def inner(name: str) -> str:
        return name

    @typed(lambda given, error: told.append(error))
    def outer(x: int) -> object:
        return inner(x) if x else apply_rotary_pos_emb("angles", x)

    with pytest.raises(BeartypeCallHintParamViolation):
        outer(1)
    with pytest.raises(ValueError, match=r"^apply_rotary_pos_emb\(\) parameter pos='angles'"):
        outer(0)
    assert told == []


def test_whatever_breaks_in_a_check_is_told_with_its_kind():
    assert str(error_of(lambda: [][1])) == "IndexError: list index out of range"
    assert str(error_of(partial(check_least, 1, heads=0))) == "heads must be at least 1, got 0"
    assert error_of(lambda: None) is None


@pytest.mark.parametrize(
    ("check", "told"),
    [
        (lambda: None, None),
        (lambda: "all is well", None),
        (lambda: [][1], "IndexError: list index out of range (on rank 1)"),
        (ValueError("caught before"), "caught before (on rank 1)"),
        (lambda: next(iter(())), "StopIteration:  (on rank 1)"),
    ],
)
def test_what_the_check_of_a_rank_raises_is_raised_on_all(check, told):
    texts = said(2, lambda ring: agree(ring, "here", {}, check=check if ring.rank else None))
    assert texts == [told and f"here: {told}"] * 2


def test_a_problem_without_words_is_one():
    def nothing() -> None:
        raise ValueError

    with pytest.raises(ValueError, match=r"^here: ValueError: $"):
        agree(Ring.alone(), "here", {}, check=nothing)


def test_arguments_are_told_by_name_whatever_they_are() -> None:
    """The module of a method, by which others are told, is one of them."""
    told: list[dict[str, Any]] = []

    class Layer:
        @typed(lambda given, error: told.append(given))
        def forward(self, x: int) -> int:
            return x

    layer: Any = Layer()
    for wrong in (lambda: layer.forward(1, 2, 3), lambda: layer.forward(y=1), layer.forward):
        with pytest.raises(ValueError, match=r"^forward\(\) "):
            wrong()
    assert told == [{"self": layer, "x": 1}, {"self": layer, "y": 1}, {"self": layer}]


def test_without_a_plan_others_are_told_where_they_agree():
    """With one nobody agrees: a wrong type is left for those who will wait."""

    def call(ring: Ring) -> None:
        tell = report_to_group("here", ring_of=lambda *_: ring)
        if ring.rank:
            tell({"options": {"plan": None}}, ValueError("of a wrong type"))
        else:
            agree(ring, "here", {})

    assert said(2, call) == ["here: of a wrong type (on rank 1)"] * 2
    ring = Ring.alone()
    report_to_group("here", ring_of=lambda *_: ring)({"plan": "a plan"}, ValueError("bad"))


def test_long_values_that_differ_are_shortened_in_the_error():
    text, _ = said(2, lambda ring: agree(ring, "here", {"x": "a" * 5000 + str(ring.rank)}))
    assert "x must be the same on every rank" in text
    assert "a" * 200 + "... (" in text
    assert len(text) < 1000


def test_ranks_that_compared_another_number_of_notes_are_out_of_step():
    def call(ring: Ring) -> None:
        ring.steps.notes += ring.rank
        agree(ring, "here", {})

    assert all("here: ranks are out of step" in text for text in said(2, call))


def test_a_wrong_type_is_reported_to_the_group_that_was_given():
    given, reports, wrong = [], [], ValueError("bad")
    ring = Ring.alone()

    def ring_of(group, size):
        given.append((group, size))
        return SimpleNamespace(report_failure=reports.append)

    report_to_group("here", ring_of=ring_of)({"plan": "a plan"}, wrong)
    assert reports == [wrong]
    with pytest.raises(AttributeError):  # it agrees, which a stand-in can't
        report_to_group("here", ring_of=ring_of)({"group": ring, "ring_size": 2}, ValueError("x"))
    assert given == [(None, None), (ring, 2)]


@pytest.mark.parametrize(
    ("error", "told"),
    [(None, []), (ValueError("bad"), ["bad"]), (RuntimeError("full"), ["RuntimeError: full"])],
)
def test_any_error_of_a_block_is_reported_and_raised(error, told):
    reports, raised = [], None
    try:
        with reporting(lambda wrong: reports.append(str(wrong))):
            if error is not None:
                raise error
    except Exception as same:
        raised = same
    assert raised is error
    assert reports == told


def test_a_wrong_type_is_reported_to_the_ring_of_the_plan_or_to_the_default_one(monkeypatch):
    reports = []
    monkeypatch.setattr(Ring, "report_failure", lambda ring, error: reports.append((ring, error)))
    ring, default, error = Ring.alone(), Ring.alone(), ValueError("bad")
    report = report_to_ring_of("cache", lambda *_: default)
    for cache in (SimpleNamespace(ring=ring), "no cache", None):
        report({"cache": cache}, error)
    assert [(where is ring, what) for where, what in reports] == [
        (True, error), (False, error), (False, error),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("size", "queries", "alike"),
    [(2, (5, 5), True), (2, (5, 6), False), (2, (None, None), False), (1, (5,), False)],
)
def test_ranks_of_a_ring_have_queries_of_their_own(size, queries, alike) -> None:
    def main(ring: Ring) -> str:
        with ring.call("a call", 1, None):
            try:
                check_same_call(ring, queries[ring.rank])
            except ValueError as error:
                return str(error)
        return ""

    told = threads.run(size, main)[0] if size > 1 else [main(Ring.alone())]
    assert ["the same queries" in each for each in told] == [alike] * size
