"""What a rank says when ranks agree: how it is written, and how it is read.

A note has three lines: how often ranks have compared notes, the size of the ring and a problem;
what must be the same; the rank's own numbers. The second is long, and the same again and again. So
it is written once, and read only where ranks differ.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

from ring_attention_pytorch.comm.notes import unreadable

_LONGEST = 2000  # characters of a problem, or of one value


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
    return text[:_LONGEST].encode(errors="replace").decode() if text else None


def _plain(value: Any) -> Any:
    """Return what JSON knows and what reads alike on all ranks."""
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (bool, int, float, type(None))):
        return value
    text = str(value)
    if len(text) <= _LONGEST:
        return text
    return f"{text[:200]}... ({sha256(text.encode(errors='replace')).hexdigest()[:12]})"
