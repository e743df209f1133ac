"""Runs: which consecutive tokens of a document each rank holds, in order of positions.

A recurrent layer carries a state through the tokens of a document. A run of consecutive tokens is
one map of that state, so only the maps of runs travel, whichever layout cut the sequence:

    zigzag, 2 ranks      |  run 0, rank 0  |  run 1, rank 1  |  run 2, rank 0  |
    document borders     0                     ^ the state begins anew: run 1 is two runs

Everything here is arithmetic on ints, the same on all ranks.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ring_attention_pytorch.geometry.documents import BatchDocuments
from ring_attention_pytorch.geometry.segments import (
    Pieces,
    Segment,
    Segments,
    count,
    whole_pieces,
)

_GATHER_RANKS = 16  # the most that get all maps: each then follows as many


class HeldRun(NamedTuple):
    """Consecutive tokens of one document on one rank.

    Attributes:
        rank, sample, document: whose tokens they are.
        start: the first one's index among the rank's tokens of the sample.
        length: how many there are, at least 1.
        position: the first one's position in its document; 0 where the state begins anew.
    """

    rank: int
    sample: int
    document: int
    start: int
    length: int
    position: int


class Link(NamedTuple):
    """The place of a run in its document: the `level`-th run of the `chain`-th document."""

    chain: int
    level: int


@dataclass(frozen=True)
class Runs:
    """The runs of all ranks: `held[rank]` in the order in which a rank holds them.

    >>> runs = Runs.of((((0, 1, 2), (6, 1, 2)), ((2, 1, 4),)), None, 1)
    >>> [[(run.start, run.position, run.length) for run in each] for each in runs.held]
    [[(0, 0, 2), (2, 6, 2)], [(0, 2, 4)]]
    """

    batch: int
    tokens: tuple[int, ...]  # of each rank, in each sample
    held: tuple[tuple[HeldRun, ...], ...]
    first: tuple[int, ...]  # the document of each sample's first token
    last: tuple[int, ...]  # and of its last one

    @classmethod
    def of(cls, segments: Sequence[Segments], packing: BatchDocuments | None, batch: int) -> "Runs":
        """List the runs of every rank's segments, for samples with these documents.

        Raises:
            ValueError: tokens of a rank are not consecutive, as in the striped layout, or ranks
                together lack some.
        """
        segments = [tuple(Segment(*each) for each in of_rank) for of_rank in segments]
        check_consecutive(segments)
        held = []
        for rank, of_rank in enumerate(segments):
            joined: dict[int, list[tuple[int, int, int, int]]] = {}  # by the documents' id
            runs = []
            for sample in range(batch):
                documents = None if packing is None else packing[sample]
                if id(documents) not in joined:
                    whole: Pieces = {0: whole_pieces(of_rank)}
                    pieces = whole if documents is None else documents.pieces(of_rank)
                    joined[id(documents)] = _joined(pieces)
                for document, start, length, position in joined[id(documents)]:
                    runs.append(HeldRun(rank, sample, document, start, length, position))
            held.append(tuple(runs))
        first, last = [0] * batch, [0] * batch
        if packing is not None:
            first = [each.runs[0].document if each.runs else 0 for each in packing]
            last = [each.runs[-1].document if each.runs else 0 for each in packing]
        tokens = tuple(map(count, segments))
        all_runs = cls(batch, tokens, tuple(held), tuple(first), tuple(last))
        _check_whole(all_runs.chains)
        return all_runs

    @cached_property
    def chains(self) -> list[list[HeldRun]]:
        """The runs of each document, in order of positions."""
        by_document: dict[tuple[int, int], list[HeldRun]] = {}
        for runs in self.held:
            for run in runs:
                by_document.setdefault((run.sample, run.document), []).append(run)
        return [
            sorted(chain, key=lambda run: run.position) for _, chain in sorted(by_document.items())
        ]

    @cached_property
    def links(self) -> dict[HeldRun, Link]:
        """The place of each run in its document."""
        return {
            run: Link(number, level)
            for number, chain in enumerate(self.chains)
            for level, run in enumerate(chain)
        }

    @cached_property
    def continues(self) -> bool:
        """Whether any run, on any rank, begins within its document."""
        return any(len(chain) > 1 for chain in self.chains)

    def ends(self) -> list[HeldRun | None]:
        """Return the run with the last token of each sample; None for a sample without tokens."""
        last = {(chain[0].sample, chain[0].document): chain[-1] for chain in self.chains}
        return [last.get((sample, document)) for sample, document in enumerate(self.last)]

    def begins(self, run: HeldRun) -> int | None:
        """Return the sample if this run has its first token; None if not."""
        is_first = run.position == 0 and run.document == self.first[run.sample]
        return run.sample if is_first else None

    def sent(self, rank: int, final: bool) -> list[int]:
        """Return which of a rank's runs others need: all with a later run, and the final ones."""
        ends = {*self.ends()} if final else set()
        numbers = []
        for number, run in enumerate(self.held[rank]):
            chain, level = self.links[run]
            if level + 1 < len(self.chains[chain]) or run in ends:
                numbers.append(number)
        return numbers

    def before(self, width: int) -> list[tuple[HeldRun, int, HeldRun, int]]:
        """List the `width` tokens before each run in its document.

        Returns:
            Tuples: the run, the token's place in 0 ... width - 1, its own run, and its index in it.
            A run that begins near its document's start has fewer. The order is the same on all
            ranks.
        """
        tokens = []
        for chain in self.chains:
            starts = [run.position for run in chain]
            for run in chain:
                for position in range(max(0, run.position - width), run.position):
                    owner = chain[bisect_right(starts, position) - 1]
                    place = position - run.position + width
                    tokens.append((run, place, owner, position - owner.position))
        return tokens


def gathers(ranks: int) -> bool:
    """Return whether all ranks get all maps; more of them compose maps by doubling.

    >>> gathers(16), gathers(17)
    (True, False)
    """
    return ranks <= _GATHER_RANKS


def distances(runs: Runs) -> list[int]:
    """Return the distances of all doublings, the same on all ranks.

    >>> runs = Runs.of(tuple(((n, 1, 1),) for n in range(6)), None, 1)
    >>> distances(runs)
    [1, 2, 4]
    """
    longest = max(map(len, runs.chains), default=0)
    return [2**step for step in range(max(longest - 1, 0).bit_length())]


def before_samples(runs: Runs, width: int) -> list[tuple[HeldRun, int, int]]:
    """List which of the `width` tokens before a run are before its sample's first token.

    Returns:
        Tuples: the run, the token's place in 0 ... width - 1 before the run, and before the sample.

    >>> runs = Runs.of((((0, 1, 2),), ((2, 1, 4),)), None, 1)
    >>> [(run.position, place, of_sample) for run, place, of_sample in before_samples(runs, 3)]
    [(0, 0, 0), (0, 1, 1), (0, 2, 2), (2, 0, 2)]
    """
    found = []
    for of_rank in runs.held:
        for run in of_rank:
            if run.document == runs.first[run.sample]:
                for place in range(width - run.position):
                    found.append((run, place, run.position + place))
    return found


def last_of_samples(runs: Runs, width: int) -> list[tuple[int, int, HeldRun | None, int]]:
    """List the `width` last tokens of each sample, in its last document.

    Returns:
        Tuples: the sample, the token's place in 0 ... width - 1, its run, and its index in it; or
        None, and its place in the `width` tokens before the sample. If the last document is not
        the first one, there are no tokens before it. The order is the same on all ranks.

    >>> runs = Runs.of((((0, 1, 2),), ((2, 1, 2),)), None, 1)
    >>> [(place, run and run.rank, index) for _, place, run, index in last_of_samples(runs, 5)]
    [(0, None, 4), (1, 0, 0), (2, 0, 1), (3, 1, 0), (4, 1, 1)]
    """
    chains = {(chain[0].sample, chain[0].document): chain for chain in runs.chains}
    tokens: list[tuple[int, int, HeldRun | None, int]] = []
    for sample, document in enumerate(runs.last):
        chain = chains.get((sample, document), [])
        starts = [run.position for run in chain]
        end = chain[-1].position + chain[-1].length if chain else 0
        for place in range(width):
            if (position := end - width + place) >= 0:
                owner = chain[bisect_right(starts, position) - 1]
                tokens.append((sample, place, owner, position - owner.position))
            elif document == runs.first[sample]:
                tokens.append((sample, place, None, width + position))
    return tokens


def check_consecutive(segments: Sequence[Segments]) -> None:
    """Raise ValueError if any rank's tokens are not runs of consecutive positions.

    >>> check_consecutive([(Segment(0, 2, 5),)])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: recurrent layers need consecutive tokens on each rank, ...
    """
    if any(segment.stride != 1 for of_rank in segments for segment in of_rank):
        raise ValueError(
            "recurrent layers need consecutive tokens on each rank, and the striped layout has "
            "runs of one token; use layout 'contiguous', 'zigzag' or one that balanced() made"
        )


def _check_whole(chains: list[list[HeldRun]]) -> None:
    """Raise ValueError if tokens of a document are on no rank, or on two."""
    for chain in chains:
        position = 0
        for run in chain:
            if run.position != position:
                raise ValueError(
                    "recurrent layers need all tokens of a sequence, each on one rank; position "
                    f"{position} of a document is followed by {run.position}"
                )
            position += run.length


def _joined(pieces: Pieces) -> list[tuple[int, int, int, int]]:
    """Return (document, start, length, position) in order of starts, adjacent pieces joined."""
    in_order = sorted(
        (start, document, segment)
        for document, of_document in pieces.items()
        for start, segment in of_document
    )
    runs: list[tuple[int, int, int, int]] = []
    for start, document, (position, _, length) in in_order:
        if runs:
            before, first, so_far, begin = runs[-1]
            if (document, start, position) == (before, first + so_far, begin + so_far):
                runs[-1] = (document, first, so_far + length, begin)
                continue
        runs.append((document, start, length, position))
    return runs
