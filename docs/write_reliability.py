"""Write the table of docs/reliability.md: `python -m docs.write_reliability`, about two minutes.

Each row is a rank that fails in one way, in one phase, over one transport, on real processes; what
the others see is measured. With `--check` nothing is written, and it is an error if what they see
is another thing, or comes later, than the page says.
"""

import sys
from itertools import starmap, zip_longest
from pathlib import Path

from tests.strikes import STRIKES, Seen, Strike, outcomes, told

PAGE = Path(__file__).with_name("reliability.md")
BEGIN, END = "<!-- the table begins -->\n", "<!-- the table ends -->\n"


def table(found: dict[Strike, list[Seen]]) -> str:
    """A row for each event, phase and transport; by default, and in `fail_together`."""
    rows = [
        "| rank 1 | in | transport | the others | in `fail_together` |",
        "|---|---|---|---|---|",
    ]
    for strike in STRIKES:
        if not strike.together:
            way = "any" if strike.phase == "agreeing" else strike.way
            both = (strike._replace(together=which) for which in (False, True))
            both = (told(each, found[each]) for each in both)
            rows.append(f"| {strike.event} | {strike.phase} | {way} | {' | '.join(both)} |")
    return "".join(f"{row}\n" for row in rows)


def untrue(page: str, rows: str) -> list[str]:
    """Rows that are not as the page promises, or not as soon."""
    promised = page.split(BEGIN)[1].split(END)[0].splitlines()
    return [
        row
        for row, promise in zip_longest(rows.splitlines(), promised, fillvalue="")
        if not all(starmap(_holds, zip_longest(row.split("|"), promise.split("|"), fillvalue="")))
    ]


def _holds(cell: str, promise: str) -> bool:
    return cell in (promise, promise.replace("within the timeout", "at once"))


def with_table(page: str, rows: str) -> str:
    """The page with these rows in place of its own."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{rows}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    page, measured = PAGE.read_text(), table(outcomes(STRIKES))
    if "--check" not in sys.argv:
        PAGE.write_text(with_table(page, measured))
    elif rows := untrue(page, measured):
        sys.exit("\n".join([f"{PAGE.name} promises otherwise, or sooner:", *rows]))
