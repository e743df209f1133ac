"""Work that a kernel puts off so that finished gradients can start their transfer."""

from collections.abc import Callable


class Deferred(list[Callable[[], None]]):
    """Deferred work, in order."""

    def do(self) -> None:
        """Run all of it, in order; empties the list."""
        while self:
            self.pop(0)()
