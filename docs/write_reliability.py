"""Write the table of docs/reliability.md: `python -m docs.write_reliability`, about two minutes.

A rank fails in one way, in one phase, over one transport, on real processes; what the others see
is measured. Transports of which the same is seen share a row. With `--check` nothing is written,
and it is an error if what they see is another thing, or comes later, than the page says.
"""

import sys
from itertools import groupby, starmap, zip_longest
from pathlib import Path

from tests.support.strikes import STRIKES, WAYS, Seen, Strike, outcomes, told

PAGE = Path(__file__).with_name("reliability.md")
BEGIN, END = "<!-- the table begins -->\n", "<!-- the table ends -->\n"


def table(found: dict[Strike, list[Seen]]) -> str:
    """A row for each event, phase and transport; by default, and in `fail_together`."""
    rows = [
        "| rank 1 | in | transport | the others | in `fail_together` |",
        "|---|---|---|---|---|",
    ]
    for strike in STRIKES:
        if not strike.together and strike in found:
            way = "any" if strike.phase == "agreeing" else strike.way
            both = (strike._replace(together=which) for which in (False, True))
            both = (told(each, found[each]) for each in both)
            rows.append(f"| {strike.event} | {strike.phase} | {way} | {' | '.join(both)} |")
    return "".join(f"{row}\n" for row in rows)


def joined(rows: str) -> str:
    """The rows, one for all transports where they differ in nothing else.

    >>> print(joined("".join(f"| a | in b | {way} | c |\\n" for way in WAYS)), end="")
    | a | in b | all | c |
    """
    lines = []
    for cells, group in groupby(rows.splitlines(), key=_but_for_transport):
        alike = list(group)
        whole = len(alike) == len(WAYS)
        lines += ["|".join([*cells[:3], " all ", *cells[3:]])] if whole else alike
    return "".join(f"{line}\n" for line in lines)


def apart(rows: str) -> list[str]:
    """The rows, one for each transport."""
    lines = []
    for line in rows.splitlines():
        ways = WAYS if " | all | " in line else ("all",)
        lines += [line.replace(" | all | ", f" | {way} | ") for way in ways]
    return lines


def _but_for_transport(row: str) -> list[str]:
    cells = row.split("|")
    return cells[:3] + cells[4:]


def untrue(page: str, rows: str) -> list[str]:
    """Rows, of some strikes or all, that are not as the page promises, or not as soon."""
    promised = {_strike(row): row for row in apart(page.split(BEGIN)[1].split(END)[0])}
    return [
        row
        for row in apart(rows)
        if not all(
            starmap(_holds, zip_longest(row.split("|"), promised.get(_strike(row), "").split("|")))
        )
    ]


def _strike(row: str) -> tuple[str, ...]:
    """Return the cells that say what happens to rank 1."""
    return tuple(row.split("|")[:4])


def _holds(cell: str | None, promise: str | None) -> bool:
    return (
        cell is not None
        and promise is not None
        and cell in (promise, promise.replace("within the timeout", "at once"))
    )


def with_table(page: str, rows: str) -> str:
    """The page with these rows in place of its own."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{joined(rows)}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    page, measured = PAGE.read_text(), table(outcomes(STRIKES))
    if "--check" not in sys.argv:
        PAGE.write_text(with_table(page, measured))
    elif rows := untrue(page, measured):
        sys.exit("\n".join([f"{PAGE.name} promises otherwise, or sooner:", *rows]))
