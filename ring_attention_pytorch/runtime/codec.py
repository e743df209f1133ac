"""Codecs: the form in which keys and values travel, and a kernel that decodes it.

    transport    moves two tensors of each token, whatever they mean
    attention    the two loops of attention.py, whose keys are encoded, with another kernel:
    Decoding     the plan's kernel: decodes a block, computes on it, and pulls the gradients back

Encoded keys take the places of k and v in a `KVBlock`, and their gradients those of dk and dv. No
transport, fabric or loop knows of codecs.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ring_attention_pytorch.runtime.accumulate import GradAccumulator, OutputAccumulator, Part
from ring_attention_pytorch.runtime.interfaces import (
    Grads,
    KVBlock,
    Residuals,
    ScoreMods,
    SelectedKernel,
    Tiles,
)
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype, wire_dtype

Pair = tuple[Tensor, Tensor]
Tensors = tuple[Tensor, ...]

MOST_DECODED = 1 << 30  # bytes of keys and values that are decoded at once, if heads allow it


@runtime_checkable
class Codec(Protocol):
    """The interface of a codec: two tensors `[b, m, g, w]` of a token's keys and values.

    Codecs are compared and hashed by value, and ranks compare their texts. `widths` are the two w;
    `d_v` is the head size of decoded values. Parameters have heads first; if `by_heads`, heads can
    be decoded apart, each from its own part of the parameters.
    """

    @property
    def widths(self) -> tuple[int, int]: ...

    @property
    def d_v(self) -> int: ...

    @property
    def by_heads(self) -> bool: ...

    def check(self, q: Tensor, encoded: Pair) -> None:
        """Raise ValueError if the sizes of q or of encoded keys don't fit this codec."""

    def decode(self, encoded: Pair, params: Tensors) -> Pair:
        """Return k `[b, m, h_kv, d]` and v `[b, m, h_kv, d_v]`."""
        ...

    def pull_back(self, encoded: Pair, params: Tensors, grads: Pair) -> tuple[Pair, Tensors]:
        """Return the gradients of the encoded keys and of the parameters, for `grads` (dk, dv)."""
        ...


def values_like(codec: Codec, encoded: Tensor) -> Tensor:
    """Return values without memory, with the sizes of decoded values except the number of heads."""
    return encoded.new_empty(()).expand(*encoded.shape[:3], codec.d_v)


def groups_of_heads(heads: int, head_bytes: int, most: int) -> int:
    """Return the number of equal groups of heads of which each takes at most `most` bytes.

    >>> groups_of_heads(128, 8192 * 320 * 2, most=256 << 20), groups_of_heads(12, 7, most=20)
    (4, 6)
    """
    fitting = (n for n in range(1, heads + 1) if heads % n == 0 and heads // n * head_bytes <= most)
    return next(fitting, heads)


def groups_of_a_call(codec: Codec, terms: ScoreMods, heads: int, head_bytes: int) -> int:
    """Return the number of groups of a block's heads, which take `head_bytes` each.

    Terms that count heads get all of them at once, as do codecs that can't decode heads apart.
    """
    counted = (terms.alibi, terms.mask_mod, terms.dropout) != (None, None, None)
    if counted or not codec.by_heads:
        return 1
    return groups_of_heads(heads, head_bytes, MOST_DECODED)


class Joined:
    """Parts of a result that a kernel computes for some heads at a time, joined over all heads.

    The same tiles make the same parts for each group, so one call for all heads would make these.
    """

    def __init__(self, total: OutputAccumulator | GradAccumulator, heads: int) -> None:
        self.total: OutputAccumulator | GradAccumulator = total
        self.heads: int = heads
        self.rooms: list[Part] = []

    def take(self, heads: slice, parts: Sequence[Part]) -> None:
        """Copy these heads' parts: (out, lse) or a gradient of queries."""
        for i, (at, tensors) in enumerate(parts):
            if i == len(self.rooms):
                self.rooms.append((at, tuple(map(self._room, tensors))))
            for room, t in zip(self.rooms[i][1], tensors):
                _of_heads(room, heads).copy_(t)

    def add(self) -> None:
        """Add the parts, of all heads now, to the total."""
        for at, tensors in self.rooms:
            self.total.add(at, *tensors)

    def _room(self, t: Tensor) -> Tensor:
        b, n, h, *d = t.shape
        return t.new_empty((b, n, self.heads, *d) if d else (b, self.heads, h))


class DecodingKernel(SelectedKernel):
    """A kernel that decodes keys before it computes on them."""

    def begin(self, params: Sequence[Tensor]) -> "Decoding":
        return Decoding(self, params)


class Decoding:
    """A plan's kernel for encoded keys, in one call, with the codec's parameters.

    It decodes a block and calls `kernel` on it: group by group of heads, if all of them would take
    much memory, each in the memory of the one before. Results of groups are `Joined`.
    """

    def __init__(self, kernel: SelectedKernel, params: Sequence[Tensor]) -> None:
        self.kernel: SelectedKernel = kernel
        self.codec: Codec = kernel.codec
        self.params: Sequence[Tensor] = params

    @cached_property
    def sums(self) -> Tensors:
        """The gradients of the parameters so far, in a wide dtype."""
        return tuple(torch.zeros_like(p, dtype=accumulation_dtype(p.dtype)) for p in self.params)

    def grads(self) -> Tensors:
        """Return the gradients of the parameters, in their dtypes."""
        return tuple(total.to(p.dtype) for total, p in zip(self.sums, self.params))

    def forward(
        self,
        q: Tensor,
        keys: KVBlock,
        tiles: Tiles,
        terms: ScoreMods,
        result: OutputAccumulator,
    ) -> None:
        """Merge attention to these encoded keys into `result`."""
        joined = Joined(result, q.shape[2])
        for heads in self._groups(q, keys, tiles, terms):
            kv, _ = self._decoded(keys, heads)
            if heads is None:
                self.kernel.forward(q, kv, tiles, terms, result)
                return
            some = _of_heads(q, heads)
            part = OutputAccumulator(some, self.codec.d_v, calls=1)
            self.kernel.forward(some, kv, tiles, terms, part)
            joined.take(heads, part.parts())
            del kv, part  # before the next group is decoded
        joined.add()

    def backward(
        self, saved: Residuals, keys: KVBlock, tiles: Tiles, terms: ScoreMods, grads: Grads
    ) -> None:
        """Add the gradients of these tiles to `grads`, whose dk and dv are of encoded keys."""
        tokens, joined = slice(0, keys.k.shape[1]), Joined(grads.dq, saved.q.shape[2])
        for heads in self._groups(saved.q, keys, tiles, terms):
            kv, params = self._decoded(keys, heads)
            some = saved.heads(heads)
            dq = grads.dq if heads is None else GradAccumulator(some.q, calls=1)
            of_kv = [GradAccumulator(t, calls=1, dtype=wire_dtype(t.dtype)) for t in kv[:2]]
            self.kernel.backward(some, kv, tiles, terms, Grads(dq, *of_kv))
            if heads is not None:
                joined.take(heads, dq.parts())
            del kv, dq
            dk, dv = (total.finalize() for total in of_kv)
            del of_kv
            encoded, of_params = self.codec.pull_back((keys.k, keys.v), params, (dk, dv))
            for total, part in zip(grads[1:], encoded):
                total.add(tokens, part)
            for so_far, part in zip(self.sums, of_params):
                so_far[heads or slice(None)] += part
        joined.add()

    def _groups(
        self, q: Tensor, keys: KVBlock, tiles: Tiles, terms: ScoreMods
    ) -> Iterator[slice | None]:
        """Yield slices of the heads; None for all of them at once. Nothing without tiles."""
        if not tiles:
            return
        b, m, *_ = keys.k.shape
        heads = q.shape[2]
        head_bytes = b * m * (q.shape[3] + self.codec.d_v) * q.element_size()
        number = groups_of_a_call(self.codec, terms, heads, head_bytes)
        if number == 1:
            yield None
            return
        size = heads // number
        for first in range(0, heads, size):
            yield slice(first, first + size)

    def _decoded(self, keys: KVBlock, heads: slice | None) -> tuple[KVBlock, Tensors]:
        """Return the block with keys and values of these heads, and the heads' parameters."""
        params = tuple(p if heads is None else p[heads] for p in self.params)
        k, v = self.codec.decode((keys.k, keys.v), params)
        return keys._replace(k=k, v=v), params


def _of_heads(t: Tensor, heads: slice) -> Tensor:
    return t[:, :, heads] if t.ndim == 4 else t[:, heads]  # lse is [b, h, n]
