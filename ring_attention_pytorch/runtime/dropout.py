"""Dropout of attention's probabilities: the mask is a pure function of numbers.

The numbers are the seed, and the global indices of sample, head, query and key. The mask does not
depend on ring, layout, transport or tiles, it is not stored, and backward computes the same one.
The Triton kernels compute the same bits (`kernels/_triton_parts.py`):

    mixed(x)   x ^= x >> 17; x *= A; x ^= x >> 11; x *= B; x ^= x >> 15; x *= C; x ^= x >> 14
    mark(word) mixed(mixed(mixed(word ^ sample) ^ head) ^ query), for both words of the seed
    draw       x = (mark ^ key) * A; x ^= x >> 16; x ^= other mark; x *= B; x ^= x >> 15; x *= C

all in unsigned 32-bit numbers. A probability is dropped where draw < rate * 2 ** 32. `mixed`, by
C. Wellons ("Prospecting for Hash Functions", triple32), is computed once per query, the draw once
per pair. Two queries drop the same keys only if both of their marks are equal.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_WORD, _SIGN = 1 << 32, 1 << 31
A, B, C = 0xED5AD4BB, 0xAC4C1B51, 0x31848BAB


class Dropout(NamedTuple):
    """A dropout of `rate` of the probabilities, drawn by a seed of 64 bits.

    Kept probabilities are multiplied by `inverse`. The first local head has number `first_head`.
    """

    rate: float
    seed: int
    first_head: int = 0

    @property
    def inverse(self) -> float:
        return 1 / (1 - self.rate)

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Both words of the seed and the bound below which draws are dropped, as signed int32."""
        mixed = _mixed_seed(self.seed)
        word, other_word = mixed % _WORD, mixed // _WORD
        bound = int(self.rate * _WORD)
        return _signed(word), _signed(other_word), _signed(bound)

    def for_layer(self, number: int) -> "Dropout":
        """Return this dropout with a seed made of its own seed and the layer's number."""
        return self._replace(seed=_mixed_seed(self.seed ^ _mixed_seed(number)))

    def marks(self, sample: Tensor, head: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return both marks of each query, from int32 tensors that broadcast; heads are local."""
        head = head + self.first_head
        marks = []
        for word in self.numbers[:2]:
            mark = _mixed(word ^ sample)
            mark = _mixed(mark ^ head)
            marks.append(_mixed(mark ^ query))
        first, second = marks
        return first, second

    def kept(self, first: Tensor, second: Tensor, key: Tensor) -> Tensor:
        """Return the mask of kept probabilities, bool, from queries' marks and keys' numbers.

        >>> dropout, at = Dropout(0.5, seed=1), torch.arange(4, dtype=torch.int32)
        >>> dropout.kept(*dropout.marks(at[:1], at[:1], at[:, None]), at).long().tolist()
        [[1, 1, 0, 1], [1, 0, 1, 1], [0, 1, 0, 1], [0, 1, 0, 1]]
        """
        x = (first ^ key).mul_(_signed(A))
        x.bitwise_xor_(_right(x, 16)).bitwise_xor_(second).mul_(_signed(B))
        x.bitwise_xor_(_right(x, 15)).mul_(_signed(C))
        # unsigned numbers compare like signed ones with the first bit flipped
        return x.bitwise_xor_(-_SIGN) >= (self.numbers[2] ^ -_SIGN)


def check_dropout(rate: float, seed: int | None) -> None:
    """Raise ValueError if a dropout rate or its seed is out of bounds."""
    if not 0 <= rate < 1:
        raise ValueError(f"dropout must be at least 0 and less than 1, got {rate}")
    if seed is not None and rate == 0:
        raise ValueError(f"dropout_seed needs a dropout above 0: nothing would be drawn by {seed}")
    check_seed(seed)


def check_seed(seed: int | None) -> None:
    """Raise ValueError if a dropout seed is negative or has more than 64 bits."""
    if seed is not None and not 0 <= seed < _WORD**2:
        raise ValueError(f"dropout_seed must be at least 0 and less than 2 ** 64, got {seed}")


def own_seed(seed: int | None) -> int:
    """Return the given seed, or one drawn from PyTorch's generator.

    The ring uses its first rank's seed, but every rank draws one, so that generators stay in step.
    """
    if seed is not None:
        return seed
    return int(torch.randint(2**63 - 1, (), device="cpu"))


def _mixed_seed(x: int) -> int:
    """Mix 64 bits: each result bit depends on all of x (splitmix64, Steele et al. 2014)."""
    x = (x + 0x9E3779B97F4A7C15) % _WORD**2
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % _WORD**2
    x = (x ^ x >> 27) * 0x94D049BB133111EB % _WORD**2
    return x ^ x >> 31


def _mixed(x: Tensor) -> Tensor:
    x = x ^ _right(x, 17)
    x = x.mul_(_signed(A)).bitwise_xor_(_right(x, 11))
    x = x.mul_(_signed(B)).bitwise_xor_(_right(x, 15))
    x = x.mul_(_signed(C))
    return x.bitwise_xor_(_right(x, 14))


def _right(x: Tensor, by: int) -> Tensor:
    """Shift int32 to the right as an unsigned number."""
    return (x >> by).bitwise_and_((1 << 32 - by) - 1)


def _signed(x: int) -> int:
    """Return the int32 with the same bits as a uint32."""
    return x - _WORD if x >= _SIGN else x
