"""Notes that ranks tell one another over the host: what they say, and how they are exchanged.

A note has three lines: how often ranks have compared notes, the size of the ring and what is wrong;
what must be the same; the rank's own numbers. The second is long, and the same again and again. So
it is written once, and read only where ranks differ.

The first message has one fixed size, so that ranks can disagree about anything but that. Only
where a note is longer do all ranks exchange the rest. Here ranks find out that they are in
different calls, because gloo matches messages by their order alone.
"""

import contextlib
import json
import os
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import sha256
from types import FrameType
from typing import Any, NamedTuple

import torch

FIRST = 4096  # bytes that are always exchanged
_MARK = b"ring-attention-pytorch 3\n"
_HEAD = struct.Struct(f">{len(_MARK)}sHQ")  # mark, bytes of the subject, bytes of the note
_LONGEST_SUBJECT = 200
_LONGEST = 1 << 28  # bytes of a note, of which every rank holds all

_LONGEST_TEXT = 2000  # characters of what is wrong, or of one value

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


# --- what a note says ---


@dataclass(frozen=True)
class Claim:
    """What must be the `same` in a rank's ring, and `everywhere` in its group, by name."""

    same: Mapping[str, Any] = field(default_factory=dict)
    everywhere: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def text(self) -> bytes:
        """The claim as it is told."""
        same = {name: _plain(value) for name, value in self.same.items()}
        return json.dumps([same, dict(self.everywhere)]).encode()


class Told(NamedTuple):
    """What a rank has told."""

    step: int  # how often it has compared notes
    ring_size: int
    problem: str | None
    claim: bytes
    own: dict[str, int]


def note(
    step: int, ring_size: int, problem: str | None, claim: bytes, own: Mapping[str, int]
) -> bytes:
    """Write a note.

    >>> note(3, 2, None, Claim({"causal": True}).text, {"n": 4})
    b'3 2 null\\n[{"causal": true}, {}]\\n{"n": 4}'
    """
    problem = json.dumps(problem) if problem else "null"
    numbers = _written(*own.items())
    return b"%d %d %s\n%s\n%s" % (step, ring_size, problem.encode(), claim, numbers)


def read(caller: str, rank: int, told: bytes) -> Told:
    """Read a rank's note, which another version of this library may have made, or no version.

    Raises:
        Disagreement: it can't be read.
    """
    try:
        head, claim, own = told.split(b"\n")
        step, ring_size, problem = head.split(b" ", 2)
        numbers = {name: int(number) for name, number in _parsed(own).items()}
        return Told(int(step), int(ring_size), _parsed(problem), claim, numbers)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise unreadable(caller, rank, error) from None


def claimed(caller: str, rank: int, told: Told) -> Claim:
    """Read a rank's claim.

    Raises:
        Disagreement: it can't be read.
    """
    try:
        same, everywhere = json.loads(told.claim)
        return Claim({**same}, {"ring size": told.ring_size, **everywhere})
    except (ValueError, TypeError, RecursionError) as error:
        raise unreadable(caller, rank, error) from None


@lru_cache(maxsize=64)
def _written(*own: tuple[str, int]) -> bytes:
    """Write numbers as JSON."""
    return json.dumps(dict(own)).encode()


@lru_cache(maxsize=64)
def _parsed(text: bytes) -> Any:
    """Parse JSON; what comes of it is not to be changed."""
    return json.loads(text)


def shortened(text: str | None) -> str | None:
    """Cut a problem to a length, and replace what can't be encoded; None for an empty one."""
    return text[:_LONGEST_TEXT].encode(errors="replace").decode() if text else None


def _plain(value: Any) -> Any:
    """Return what JSON knows and what reads alike on all ranks."""
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (bool, int, float, type(None))):
        return value
    text = str(value)
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[:200]}... ({sha256(text.encode(errors='replace')).hexdigest()[:12]})"
