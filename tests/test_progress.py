"""Progress: silent unless asked for, a line every few seconds, on the first rank alone."""

import logging
from collections.abc import Iterator
from unittest import mock

import pytest

from ring_attention_pytorch import progress
from ring_attention_pytorch.progress import counted, logger, say, show


@pytest.fixture(autouse=True)
def unasked() -> Iterator[None]:
    """Undo `show`, which other tests of this process call too, before each test and after it."""
    logger.handlers.clear()
    logger.setLevel(logging.WARNING)  # as by default, whatever the root logger's level is now
    yield
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)


def clock(*seconds: float) -> mock._patch:
    """A clock that shows these seconds, one after the other."""
    return mock.patch.object(progress.time, "perf_counter", side_effect=seconds)


def test_a_line_after_a_second_then_every_five(capsys: pytest.CaptureFixture[str]) -> None:
    show()
    parts = [[0] * 3, [0] * 3, [0] * 2, [0] * 4, [0]]
    with clock(10, 10.5, 11.5, 13, 16.6, 17):
        assert [*counted(parts, "prompt", 13, "tokens", len)] == parts
    say("measuring the kernel %s", "triton")
    assert capsys.readouterr().err.splitlines() == [
        "prompt: 6 of 13 tokens, 2 s",
        "prompt: 12 of 13 tokens, 7 s",
        "measuring the kernel triton",
    ]


def test_nothing_is_said_and_no_clock_read_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with clock():
        assert [*counted("abc", "letters", 3, "letters")] == [*"abc"]
    say("measuring")
    assert capsys.readouterr().err == ""


def test_other_ranks_are_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    show()
    say("measuring")
    assert capsys.readouterr().err == ""


def test_lines_are_printed_once_however_often_it_is_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show()
    show()
    say("measuring")
    assert capsys.readouterr().err == "measuring\n"
