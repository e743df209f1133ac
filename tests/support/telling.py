"""Errors that the ranks of a ring of threads get for a mistake."""

from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads


def said(size: int, call) -> list[str | None]:
    """Return each rank's error, None if there is none."""

    def main(ring: Ring) -> str | None:
        try:
            call(ring)
        except ValueError as error:
            return str(error)
        return None

    return threads.run(size, main)[0]
