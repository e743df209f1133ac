"""A checksum of a cache's contents, the same on all ranks that are in step; ints only.

    lengths    6 6 4    weighted sum, a weight per sequence: appending costs one addition
    order      0 2 1    the sequence that each continues, after reordering and forking
    padding    0 3 0    one crc32 of order and padding

Ranks put it into the stamps of their messages, so it costs no message of its own. GPUs that share
memory add up the lengths themselves, since CUDA graphs advance them.
"""

from collections.abc import Sequence
from operator import mul
from zlib import crc32

_BITS = 0x7FFFFFFF


class Lineage:
    """Checksums of sequences: their order, their padding, and their lengths in each layer.

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
        self._ids = [*range(sequences)]  # of the sequence that each continues
        self._starts = [0] * sequences
        self._counts = [0] * layers
        self.order = 0  # a checksum of all but lengths
        self._sum()

    def mark(self, layer: int) -> int:
        """Return the checksum of a layer."""
        return (self.order + self._counts[layer]) & _BITS

    def advance(self, layer: int, n: int) -> None:
        """Count n more tokens of each sequence."""
        self._counts[layer] += n * self._all

    def count(self, lengths: Sequence[Sequence[int]]) -> None:
        """Set the lengths of each sequence in each layer."""
        self._counts = [sum(map(mul, self.weights, each)) & _BITS for each in lengths]

    def reorder(self, beams: Sequence[int]) -> None:
        """Make sequence i continue sequence `beams[i]`; copies of one sequence get new ids."""
        ids = [self._ids[source] for source in beams]
        several = [beams.count(source) > 1 for source in beams]
        self._ids = [
            _number(each, place) if new else each
            for place, (each, new) in enumerate(zip(ids, several))
        ]
        self._sum()

    def pad(self, starts: Sequence[int]) -> None:
        """Set the padding of each sequence."""
        self._starts = [*starts]
        self._sum()

    def begin(self) -> None:
        """Start all sequences anew: none continues another."""
        self._ids = [*range(len(self._ids))]
        self._sum()

    def _sum(self) -> None:
        self.order = _number(*self._ids, *self._starts)


def _number(*of: int) -> int:
    return crc32(repr(of).encode()) & _BITS
