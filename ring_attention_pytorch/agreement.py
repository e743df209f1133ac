"""All ranks agree, or all raise the same error: before any tensor is sent.

A rank that disagrees about a shape makes gloo end the process, hand out wrong data, or hang.
So whoever starts an exchange first compares notes, in one small all-gather over the host.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ring_attention_pytorch.ring import Ring

_LONGEST_PROBLEM = 1200


def agree(
    ring: Ring,
    caller: str,
    same: Mapping[str, Any],
    own: Mapping[str, int] | None = None,
    problem: str | None = None,
) -> list[dict[str, int]]:
    """Every rank's `own` numbers, after making sure that `same` is the same on all ranks.

    `problem` is what this rank found wrong by itself; it is raised on every rank, so that no
    rank is left waiting.

    Raises:
        ValueError: a rank has a problem, or ranks differ; the same text on all ranks.
    """
    note = {
        "same": {name: _plain(value) for name, value in same.items()},
        "own": dict(own or {}),
        "problem": problem and problem[:_LONGEST_PROBLEM],
    }
    notes = [
        json.loads(m) for m in ring.gather_bytes(json.dumps(note, ensure_ascii=False).encode())
    ]
    problems = _by_value([n["problem"] for n in notes])
    problems.pop(None, None)
    if problems:
        raise ValueError(
            f"{caller}: " + "; ".join(_at(p, ranks, ring.size) for p, ranks in problems.items())
        )
    for name in _names(notes):
        found = _by_value([json.dumps(n["same"].get(name)) for n in notes])
        if len(found) > 1:
            values = ", ".join(f"{v} on {_ranks(ranks)}" for v, ranks in found.items())
            raise ValueError(
                f"{caller}: {name} must be the same on every rank, got {values}; "
                "pass the same on all"
            )
    return [n["own"] for n in notes]


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
