"""All ranks agree, or all raise the same error: before any tensor is sent.

A rank that disagrees about a shape makes gloo end the process, hand out wrong data, or hang.
So whoever starts an exchange first compares notes, in one small all-gather over the host.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ring_attention_pytorch.ring import Ring

_LONGEST_PROBLEM = 1200  # bytes; quoting may double them, and messages are of one fixed size


def agree(
    ring: Ring,
    caller: str,
    same: Mapping[str, Any],
    own: Mapping[str, int] | None = None,
    problem: str | None = None,
    everywhere: Mapping[str, Any] | None = None,
) -> list[dict[str, int]]:
    """The `own` numbers of each rank of the ring, once `same` is the same on all of them.

    `problem` is what this rank found wrong by itself; it is raised on every rank of the group,
    so that no rank is left waiting. Ranks in messages are those of the group. `everywhere` is
    what must be the same in all rings of the group, for it decides what they exchange next.

    Raises:
        ValueError: a rank has a problem, or ranks differ; the same text on all ranks.
    """
    note = {
        "everywhere": {"ring size": ring.size, **(everywhere or {})},
        "same": {name: _plain(value) for name, value in same.items()},
        "own": dict(own or {}),
        "problem": _shortened(problem or ring.problem or "") or None,
    }
    message = json.dumps(note, ensure_ascii=False).encode(errors="replace")
    notes = [json.loads(m) for m in ring.gather_bytes(message)]
    problems = _by_value([n["problem"] for n in notes])
    problems.pop(None, None)
    if problems:
        found = (_at(p, ranks, len(notes)) for p, ranks in problems.items())
        raise ValueError(f"{caller}: {'; '.join(found)}")
    for name in notes[0]["everywhere"]:
        _check_same(caller, name, [n["everywhere"].get(name) for n in notes], first=0)
    rings = [notes[first : first + ring.size] for first in range(0, len(notes), ring.size)]
    for number, members in enumerate(rings):  # all of them: no ring is left alone with a mistake
        for name in _names(members):
            values = [n["same"].get(name) for n in members]
            _check_same(caller, name, values, first=number * ring.size)
    return [n["own"] for n in rings[ring.first // ring.size]]


def raise_together(ring: Ring, caller: str, problem: str | None) -> None:
    """Raise what this ring found wrong with what its ranks said, which all of them know.

    Other rings of the group are told, for else they would wait for these in what the whole group
    exchanges next. All ranks of the group call this, whatever they found.

    Raises:
        ValueError: a ring has a problem; the same text on all ranks of the group.
    """
    if ring.several:
        agree(ring, caller, {}, problem=problem)
    elif problem is not None:
        raise ValueError(f"{caller}: {problem}")


def _check_same(caller: str, name: str, values: list[Any], first: int) -> None:
    found = _by_value([json.dumps(value, ensure_ascii=False) for value in values])
    if len(found) > 1:
        got = ", ".join(f"{v} on {_ranks([first + r for r in at])}" for v, at in found.items())
        raise ValueError(
            f"{caller}: {name} must be the same on every rank, got {got}; pass the same on all"
        )


def _shortened(text: str) -> str:
    return text.encode(errors="replace")[:_LONGEST_PROBLEM].decode(errors="ignore")


def _names(notes: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for n in notes for name in n["same"]))


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (bool, int, float, type(None))) else str(value)[:100]


def _by_value(values: list[Any]) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        found[value].append(rank)
    return found


def _at(problem: str, ranks: list[int], size: int) -> str:
    return problem if len(ranks) == size else f"{problem} (on {_ranks(ranks)})"


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
