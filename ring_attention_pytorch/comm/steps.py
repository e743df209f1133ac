"""What the ranks of a ring have done together: who is out of step has other numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from zlib import crc32

from ring_attention_pytorch.comm.failures import RingError, Step, tell_peers
from ring_attention_pytorch.comm.notes import Disagreement


class Steps:
    """Numbers of a ring's calls and exchanges, and what becomes of them when one fails.

    Messages between two ranks match by these numbers where the backend compares tags (gloo does,
    NCCL does not): what belongs to a call that a rank has skipped, or made by another plan, is
    never taken for what belongs to its next one. All rings of a group compare notes together, and
    count on from there.
    """

    def __init__(self, met: list[int] | None = None) -> None:
        self._met = [0] if met is None else met  # how often notes were compared, one for a group
        self._since = self.calls = self.hops = self._base = 0
        self.about: tuple[int, str] = (0, "no call")  # a plan, and what it is for
        self.broken: str | None = None  # by what, until all ranks compare notes again
        self.under_way: list[object] = []  # transfers that nobody has waited for
        self._left: list[object] = []  # of a call that failed

    @property
    def notes(self) -> int:
        """How often the group has compared notes."""
        return self._met[0]

    @notes.setter
    def notes(self, number: int) -> None:
        self._met[0] = number

    @property
    def now(self) -> Step:
        """Where this rank is."""
        plan, operation = self.about
        return Step(operation, plan, self.calls, self.hops)

    @contextmanager
    def call(self, operation: str, plan: int = 0) -> Iterator[None]:
        """A block that is another call; if it fails, this ring is broken on this rank.

        Not if ranks disagree: then all of them know it, and are where they were.

        Raises:
            RingError: a call before it has failed, so the others' messages are not for this one.
        """
        self._check_whole()
        self._count_on()
        self._begin(self.calls + 1, (plan, operation))
        try:
            yield
        except Disagreement:
            raise
        except BaseException as error:
            self._break(error)
            tell_peers()
            raise

    def tag(self) -> int:
        """Of the next messages, positive and of 31 bits."""
        self._check_whole()
        self._count_on()
        self.hops += 1
        return crc32(self.hops.to_bytes(4, "little"), self._base) >> 1

    def compare(self, subject: str) -> None:
        """Begin to compare notes on that."""
        self.notes += 1
        self._begin(0, (0, f"comparing notes on {subject}"))

    def mend(self) -> None:
        """Go on after notes were compared: all ranks are together, whatever has failed before."""
        self.broken = None

    def _break(self, error: BaseException) -> None:
        if self.broken is not None:  # by a call within this one
            return
        self.broken = f"{self.now}: {type(error).__name__}: {error}"
        # gloo's buffers must live until what is under way has come, which nobody waits for now
        self._left, self.under_way = self.under_way, []

    def _check_whole(self) -> None:
        if self.broken is not None:
            raise RingError(
                f"this ring is broken on this rank since a call failed ({self.broken}); it is "
                "whole again once all ranks make a plan, or call without one",
                self.now,
            )

    def _count_on(self) -> None:
        if self._since != self.notes:  # which another ring of the group has compared
            self._begin(0, self.about)

    def _begin(self, call: int, about: tuple[int, str]) -> None:
        self._since, self.calls, self.hops, self.about = self.notes, call, 0, about
        self._base = crc32(repr((self.notes, call, about)).encode())
