"""Thorough tests: `pytest --sample SEED` runs some of them, which the seed draws.

CI's seed is the commit: what one run leaves out another one has. It runs a fifth of the thorough
tests, of each long grid of cases the number that is given there, and what is `in_ci`. Without a
seed all of them run, unless `-m "not thorough"` leaves them out.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from typing import Any, TypeVar
from zlib import crc32

import pytest

_T = TypeVar("_T")
_ONE_IN = 5  # thorough tests
_ALL = 1 << 20


def sampled(rows: Sequence[_T], number: int, seed: str | None) -> list[_T]:
    """Return so many of the rows, in their order; all of them if there is no seed.

    A row that is added or taken away changes few others.

    >>> sampled(range(10), 3, "a"), sampled(range(10), 3, "a"), len(sampled(range(10), 3, None))
    ([0, 4, 8], [0, 4, 8], 10)
    """
    if seed is None:
        return list(rows)
    places = sorted(range(len(rows)), key=lambda i: crc32(f"{seed} {rows[i]}".encode()))[:number]
    return [rows[place] for place in sorted(places)]


def grid(
    names: str, rows: Iterable[Any], *, always: int, drawn: int, ids: Any = None
) -> pytest.MarkDecorator:
    """Parametrize by rows: so many run always, others are thorough; CI has `drawn` of those.

    Which run always depends on the rows alone.
    """
    values = [_param(row) for row in rows]
    often = sampled(range(len(values)), always, "always")
    rare = (pytest.mark.thorough, pytest.mark.grid(drawn))
    for number in {*range(len(values))} - {*often}:
        values[number] = values[number]._replace(marks=(*values[number].marks, *rare))
    return pytest.mark.parametrize(names, values, ids=ids)


def _param(row: Any) -> Any:
    """Return a row, the values of all names or of one, as pytest has it."""
    if hasattr(row, "marks"):
        return row
    return pytest.param(*(row if isinstance(row, tuple) else (row,)))


def in_ci(test: _T) -> _T:
    """Mark a test that is thorough, but CI always runs it."""
    return pytest.mark.thorough(pytest.mark.grid(_ALL)(test))


def leave_out(items: list[pytest.Item], seed: str | None) -> list[pytest.Item]:
    """Take the thorough tests that the seed does not draw off the items; return them."""
    left_out: set[str] = set()
    for names, number in _thorough(items) if seed is not None else ():
        left_out |= {*names} - {*sampled(names, number, seed)}
    gone = [item for item in items if item.nodeid in left_out]
    items[:] = [item for item in items if item.nodeid not in left_out]
    return gone


def _thorough(items: Iterable[pytest.Item]) -> Iterator[tuple[list[str], int]]:
    """Yield the cases of each grid, then all other thorough tests; how many to draw of them."""
    others, grids = [], dict[str, tuple[list[str], int]]()
    for item in items:
        if (mark := item.get_closest_marker("grid")) is not None:
            names, _ = grids.setdefault(item.nodeid.partition("[")[0], ([], mark.args[0]))
            names.append(item.nodeid)
        elif item.get_closest_marker("thorough") is not None:
            others.append(item.nodeid)
    yield from grids.values()
    yield others, ceil(len(others) / _ONE_IN)
