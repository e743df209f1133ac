"""Generated faults that no test can find, each with the reason."""

SURVIVORS: dict[str, str] = {}
