"""The record of what the package computes: the same twice, and another where anything changes."""

import pytest

from ring_attention_pytorch.kernels import eager
from tests.support import golden
from tests.support.random_draw import Case
from tests.support.threads import ThreadRing

CASES = golden.drawn(16)
scores_of, exchange = eager.scores_of, ThreadRing.exchange


def recorded() -> golden.Record:
    return dict(map(golden.computed, CASES))


@pytest.fixture(scope="module")
def before() -> golden.Record:
    return recorded()


def fields(lines: list[str]) -> set[str]:
    """In which the cases differ."""
    return {field for line in lines for field in line.rpartition(": ")[2].split(", ")}


def test_a_record_is_the_same_twice(before):
    assert golden.differences(before, recorded()) == []
    assert {*before[CASES[3]]} == {"bits", "messages", "bytes", "notes", "calls"}


def test_a_last_bit_is_seen(before, monkeypatch):
    def nearly(*given):
        scores, rest = scores_of(*given)
        return scores * (1 + 2**-52), rest

    monkeypatch.setattr(eager, "scores_of", nearly)
    assert fields(golden.differences(before, recorded())) == {"bits"}


def test_a_message_more_is_seen(before, monkeypatch):
    def twice(self, sends, receives):
        exchange(self, [], []).wait()
        return exchange(self, sends, receives)

    monkeypatch.setattr(ThreadRing, "exchange", twice)
    assert "messages" in fields(golden.differences(before, recorded()))


def test_another_text_is_seen():
    case = str(Case(length=5, prefix=(2,)))  # not causal
    refused = dict([golden.computed(case)])
    assert "prefix needs causal" in refused[case]["error"]
    assert golden.differences(refused, {case: {"error": "no"}}) == [f"{case}: error"]


def test_a_case_that_a_revision_does_not_know_is_seen(before):
    (case, unknown) = golden.computed(CASES[0].replace("Case(", "Case(sparse=True, "))
    assert "sparse" in unknown["error"]
    assert fields(golden.differences({case: before[CASES[0]]}, {case: unknown})) > {"error"}


def test_a_case_that_is_gone_is_seen(before):
    less = dict(list(before.items())[1:])
    assert len(golden.differences(before, less)) == len(golden.differences(less, before)) == 1
