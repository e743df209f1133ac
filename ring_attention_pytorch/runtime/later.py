"""What a kernel leaves undone while what it has made already travels."""

from collections.abc import Callable


class Later(list[Callable[[], None]]):
    """What is left to be done later, in order."""

    def do(self) -> None:
        """Do it."""
        while self:
            self.pop(0)()
