"""Notes that ranks tell one another over the host: of any length, each with its subject.

The first message has one fixed size, so that ranks can disagree about anything but that. Only
where a note is longer do all ranks exchange the rest. Here ranks find out that they are in
different calls, because gloo matches messages by their order alone.
"""

import contextlib
import os
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import FrameType

import torch

FIRST = 4096  # bytes that are always exchanged
_MARK = b"ring-attention-pytorch 3\n"
_HEAD = struct.Struct(f">{len(_MARK)}sHQ")  # mark, bytes of the subject, bytes of the note
_LONGEST_SUBJECT = 200
_LONGEST = 1 << 28  # bytes of a note, of which every rank holds all

# (message, size) -> the message of every rank, filled up to that size
Gather = Callable[[bytes, int], Sequence[bytes]]

# files that start with these are no callers of this library
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_PASSED_BY = (_PACKAGE, os.path.dirname(torch.__file__), contextlib.__file__, "<")


class Disagreement(ValueError):
    """An error that ranks found together: all raise it, in the same words, and can go on."""


def exchange(gather: Gather, subject: str, note: bytes) -> list[bytes]:
    """Exchange notes; return that of every rank. All ranks call this, with the same subject.

    Only first lines of subjects are compared. What follows may differ; errors tell it, too.

    Raises:
        Disagreement: the subjects differ, or what came is no note, or a note is too long.

    >>> exchange(lambda message, size: [message.ljust(size, b"?")] * 2, "lengths", b"13")
    [b'13', b'13']
    """
    about = subject.encode(errors="replace")[:_LONGEST_SUBJECT]
    message = _HEAD.pack(_MARK, len(about), len(note)) + about + note
    firsts = gather(message[:FIRST], FIRST)
    if firsts.count(message.ljust(FIRST, b"\0")) == len(firsts):
        return [note] * len(firsts)  # all have told what this rank has: there is nothing to read
    subjects, spans = zip(*(_opened(first) for first in firsts))
    check_subjects(subjects)
    lengths = [span.stop - span.start for span in spans]
    if max(lengths) > _LONGEST:
        rank = lengths.index(max(lengths))
        why = f"it has {max(lengths)} bytes, more than {_LONGEST}"
        raise unreadable(subject.split("\n")[0], rank, why)
    more = max(span.stop for span in spans) - FIRST
    rests = gather(message[FIRST:], more) if more > 0 else [b""] * len(spans)
    notes = []
    for first, rest, span in zip(firsts, rests, spans):
        notes.append((first + rest)[span])
    return notes


def _opened(first: bytes) -> tuple[str | None, slice]:
    """Return a message's subject, and where its note is; no subject if it is no note."""
    mark, about, length = _HEAD.unpack(first[: _HEAD.size])
    if mark != _MARK or about > _LONGEST_SUBJECT:
        return None, slice(0, 0)
    start = _HEAD.size + about
    return first[_HEAD.size : start].decode(errors="replace"), slice(start, start + length)


def unreadable(caller: str, rank: int, why: object) -> Disagreement:
    """Make the error of a note that can't be read: another version of this library has made it."""
    return Disagreement(
        f"{caller}: the note of rank {rank} can't be read: {why}; "
        "run the same version of this library on all ranks"
    )


def check_subjects(subjects: Sequence[str | None]) -> None:
    """Raise Disagreement where ranks are in different calls, or one is in none of this library."""
    first_lines = [subject and subject.split("\n")[0] for subject in subjects]
    if len({*first_lines}) == 1 and first_lines[0] is not None:
        return
    calls = []
    for ranks in by_value(first_lines).values():
        calls.append(f"{ranks_of(ranks)}: {_in_one_line(subjects[ranks[0]])}")
    raise Disagreement(
        "ranks are in different calls, all of them must make the same ones in the same order; "
        f"now they are in {'; '.join(calls)}"
    )


def _in_one_line(subject: str | None) -> str:
    return "something else than this library" if subject is None else subject.replace("\n", " ")


def call_site(frame: FrameType | None = None) -> str:
    """Return where this library was called, as "at train.py:31"; empty if no caller is found.

    `frame` is where another thread is; by default the caller's is looked at.
    """
    frame = frame or sys._getframe(1)
    while frame is not None:
        if name := _caller(frame.f_code.co_filename):
            return f"at {name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@lru_cache(maxsize=1024)
def _caller(path: str) -> str:
    """Return the name of a file that calls this library; empty for what is passed by."""
    return "" if path.startswith(_PASSED_BY) else os.path.basename(path)


def by_value(values: Sequence) -> dict[object, list[int]]:
    """List the ranks that have each value, in order of appearance."""
    found: dict[object, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        found[value].append(rank)
    return found


def ranks_of(ranks: Sequence[int]) -> str:
    """Name ranks in words.

    >>> ranks_of([2]), ranks_of([0, 2])
    ('rank 2', 'ranks 0, 2')
    """
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
