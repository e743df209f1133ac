"""A number of what a cache holds, the same on all ranks that are in step: ints only.

    lengths    6 6 4    each times a number of its sequence, added up: new tokens cost one addition
    order      0 2 1    which sequences were these, before they were reordered and forked
    padding    0 3 0    a checksum of both

Ranks put it into the tags of their messages, so it costs none. GPUs that share memory add lengths
up themselves, since CUDA graphs advance them.
"""

from collections.abc import Sequence
from operator import mul
from zlib import crc32

_BITS = 0x7FFFFFFF


class Lineage:
    """What sequences go on from, how they are padded, and how long those of each layer are.

    >>> one, other = Lineage(2, layers=1), Lineage(2, layers=1)
    >>> one.advance(0, 3)
    >>> other.count([[3, 3]])
    >>> one.mark(0) == other.mark(0)
    True
    >>> other.reorder([1, 0])
    >>> one.mark(0) == other.mark(0)
    False
    """

    def __init__(self, sequences: int, layers: int) -> None:
        self.weights = [_number(sequence) | 1 for sequence in range(sequences)]
        self._all = sum(self.weights)
        self._ids = [*range(sequences)]  # of what each goes on from
        self._starts = [0] * sequences
        self._counts = [0] * layers
        self.order = 0  # a checksum of all but lengths
        self._sum()

    def mark(self, layer: int) -> int:
        """Return the number of a layer."""
        return (self.order + self._counts[layer]) & _BITS

    def advance(self, layer: int, n: int) -> None:
        """Count n more tokens of each sequence."""
        self._counts[layer] += n * self._all

    def count(self, lengths: Sequence[Sequence[int]]) -> None:
        """Count the tokens of each sequence in each layer anew."""
        self._counts = [sum(map(mul, self.weights, each)) & _BITS for each in lengths]

    def reorder(self, beams: Sequence[int]) -> None:
        """Let sequence i go on from sequence `beams[i]`; several that go on from one are new."""
        ids = [self._ids[source] for source in beams]
        several = [beams.count(source) > 1 for source in beams]
        self._ids = [
            _number(each, place) if new else each
            for place, (each, new) in enumerate(zip(ids, several))
        ]
        self._sum()

    def pad(self, starts: Sequence[int]) -> None:
        """Note the padding of each sequence."""
        self._starts = [*starts]
        self._sum()

    def begin(self) -> None:
        """Let sequences go on from none."""
        self._ids = [*range(len(self._ids))]
        self._sum()

    def _sum(self) -> None:
        self.order = _number(*self._ids, *self._starts)


def _number(*of: int) -> int:
    return crc32(repr(of).encode()) & _BITS
