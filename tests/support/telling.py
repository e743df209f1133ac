"""What each rank of a ring of threads hears of a mistake."""

from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads


def said(size: int, call) -> list[str | None]:
    """What each rank was told, None if nothing."""

    def main(ring: Ring) -> str | None:
        try:
            call(ring)
        except ValueError as error:
            return str(error)
        return None

    return threads.run(size, main)[0]
