"""Runs cut into pieces, so that kernels follow several at once.

A kernel follows the states of a run chunk by chunk, in a program for each head and some columns. A
few runs don't fill a GPU. So long runs are cut into pieces, each with a map of its own. Only their
rank knows of them; other ranks get the map of the whole run:

    maps of pieces ─► maps of runs ─► ranks exchange them ─► states before runs ─► before pieces
"""

from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from ring_attention_pytorch.recurrent.chunks import CHUNK, How
from ring_attention_pytorch.recurrent.levels import Levels
from ring_attention_pytorch.recurrent.plan import RunPlan

_PIECES = 4  # of a rank, about
_SHORTEST = 2048  # tokens

Span = tuple[int, int]  # the first token, and the number of tokens


class Cuts(NamedTuple):
    """A rank's runs in pieces, in the order held.

    Attributes:
        how: where pieces are.
        pieces: which of them have maps: all of a run that is sent, all but the last of another.
        spans: int64 `[maps, 2]`, first tokens and ends of these.
        within: for each run, the maps of all pieces but the last. They lead from the state before
            the run to those before its pieces.
        first, last: for each run that is sent, the maps of its first and last piece.
        ends: for each run that is sent, its last piece.
        rest: for each run that is sent, the maps after the first.
        composed: for each run that is sent, its map's place among the states of `rest`.
    """

    how: How
    pieces: Tensor
    spans: Tensor
    within: Levels
    first: Tensor
    last: Tensor
    ends: Tensor
    rest: Levels
    composed: Tensor

    @classmethod
    def of(cls, plan: RunPlan, final: bool) -> "Cuts":
        """Cut this rank's runs, for calls with final states or without.

        A document that is whole on its rank stays one run.
        """
        runs, rank = plan.runs, plan.ring.rank
        longest = longest_of(runs.batch * runs.tokens[rank])
        sent = {*runs.sent(rank, final)}
        spans: list[Span] = []
        pieces: list[int] = []
        within: list[list[int]] = []
        composed: list[list[int]] = []
        for number, (run, span) in enumerate(zip(plan.mine, plan.spans)):
            alone = len(runs.chains[runs.links[run].chain]) == 1
            cut = [span] if alone else pieces_of(span, longest)
            with_maps = len(cut) if number in sent else len(cut) - 1
            maps = [*range(len(pieces), len(pieces) + with_maps)]
            within.append(maps[: len(cut) - 1])
            composed += [maps] if number in sent else []
            pieces += range(len(spans), len(spans) + with_maps)
            spans += cut
        last = [maps[-1] for maps in composed]
        how, numbers = How.of(spans, plan.device), plan.indices(pieces)
        return cls(
            how=how,
            pieces=numbers,
            spans=how.spans[numbers],
            within=Levels.of(within, plan.device),
            first=plan.indices([maps[0] for maps in composed]),
            last=plan.indices(last),
            ends=plan.indices([pieces[place] for place in last]),
            rest=Levels.of([maps[1:] for maps in composed], plan.device),
            composed=plan.indices([n - 1 for n in accumulate(map(len, composed))]),
        )

    @property
    def whole(self) -> bool:
        """Whether no run is cut."""
        return not self.within.steps


def longest_of(tokens: int) -> int:
    """Return the most tokens of a piece, whole chunks, for so many tokens of a rank.

    >>> longest_of(16384), longest_of(5000)
    (4096, 2048)
    """
    return max(_SHORTEST, -(-tokens // (_PIECES * CHUNK)) * CHUNK)


def pieces_of(span: Span, longest: int) -> list[Span]:
    """Return pieces of a run, about equal, cut at multiples of a chunk from its start.

    >>> pieces_of((10, 200), 128)
    [(10, 128), (138, 72)]
    """
    first, length = span
    count = -(-length // longest)
    size = -(-length // (count * CHUNK)) * CHUNK
    return [(first + at, min(size, length - at)) for at in range(0, length, size)]
