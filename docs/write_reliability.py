"""Write the table of docs/reliability.md: `python -m docs.write_reliability`, about two minutes.

Each row is a rank that fails in one way, in one phase, over one transport, on real processes; what
the others see is measured. With `--check` nothing is written, and another table is an error.
"""

import sys
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
            both = (told(found[strike._replace(together=which)]) for which in (False, True))
            rows.append(f"| {strike.event} | {strike.phase} | {way} | {' | '.join(both)} |")
    return "".join(f"{row}\n" for row in rows)


def with_table(page: str, rows: str) -> str:
    """The page with these rows in place of its own."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{rows}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    page = PAGE.read_text()
    written = with_table(page, table(outcomes(STRIKES)))
    if "--check" not in sys.argv:
        PAGE.write_text(written)
    elif written != page:
        sys.exit(f"{PAGE.name} says otherwise than what was measured; run this without --check")
