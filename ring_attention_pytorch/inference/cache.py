"""A cache of keys and values that stays spread over the ranks of a ring.

Every rank holds its share of every sequence, in pages (`pages`), and knows all lengths. Tokens are
appended, forgotten, and shared between sequences without a message.
"""

from collections.abc import Sequence
from typing import Any

import torch
from beartype import beartype
from torch import Tensor

from ring_attention_pytorch.comm.agreement import agree, told_by_group, typed
from ring_attention_pytorch.comm.ring import Group, as_ring
from ring_attention_pytorch.inference.page_table import Copies
from ring_attention_pytorch.inference.storage import PagedStorage, Sizes
from ring_attention_pytorch.runtime.rowwise import has_triton

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LARGEST_PAGE = 256


class RingCache(PagedStorage):
    """Keys and values of some sequences and layers, of which each rank of a ring holds its share.

    Lengths, positions and owners count tokens of the whole sequence. All ranks make the same calls
    in the same order; none of them sends anything.

    Args:
        sequences: how many there are; they have lengths of their own.
        key_heads, head_dim: of keys; values have `value_dim`, or head_dim too.
        layers: how many layers' keys are kept. They share pages.
        capacity: the most tokens of a sequence. All memory is allocated at once, and CUDA graphs
            may append. None lets memory grow by pages.
        page: tokens that lie on one rank before the next has its turn, 1 to 256.
        dtype, device: of keys and values.
        group: the ring; None is the default group, or this process alone.

    Attributes:
        lengths_of: int32 `[layers, sequences]` on the device; what CUDA graphs read and advance.
        starts: int32 `[sequences]`: tokens before this one are never seen (left padding).
        tables: int32 `[sequences, pages]`: where in `keys` and `values` each page is.
        keys, values: a pool for each layer, `[pages, key_heads, page, head_dim]`.

    Raises:
        ValueError: an argument is invalid or differs between ranks; on every rank.

    >>> cache = RingCache(1, key_heads=2, head_dim=4, page=2)
    >>> cache.append(torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2, 4))
    >>> cache.lengths, cache.local_lengths, cache.owner(2)
    ([3], [3], 0)
    >>> cache.rollback(1)
    >>> cache.lengths
    [2]
    """

    @typed(told_by_group("RingCache"))
    def __init__(  # noqa: PLR0913 - a public entry point
        self,
        sequences: int,
        key_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        layers: int = 1,
        capacity: int | None = None,
        page: int = 64,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        group: Group = None,
    ) -> None:
        ring = as_ring(group)
        sizes = Sizes(
            sequences, key_heads, head_dim, head_dim if value_dim is None else value_dim, layers
        )
        same = {**sizes._asdict(), "capacity": capacity, "page": page, "dtype": dtype}
        problem = _problem(sizes._asdict(), capacity, page, dtype)
        if problem is None:
            try:
                super().__init__(ring, sizes, capacity, page, dtype, _indexed(device))
            except (RuntimeError, MemoryError) as error:
                problem = _memory_problem(sizes, capacity, ring.size, error)
        agree(ring, "RingCache", same, problem=problem)
        self.plans: dict[Any, Any] = {}  # of attention to this cache
        self.checked: dict[Any, Any] = {}  # the plans for calls whose arguments were right

    @property
    def lengths(self) -> list[int]:
        """The tokens of each sequence, on all ranks together."""
        return list(self.lengths_in(0))

    @property
    def local_lengths(self) -> list[int]:
        """The tokens of each sequence that this rank holds."""
        return [self.pages.held(self.ring.rank, length) for length in self.lengths]

    @property
    def nbytes(self) -> int:
        """The bytes of keys and values on this rank."""
        return sum(t.nbytes for t in (*self.keys, *self.values))

    @beartype
    def owner(self, token: int) -> int:
        """Return the rank that holds a token, the same for all sequences."""
        return self.pages.owner(token)

    def append(self, k: Tensor, v: Tensor, layer: int = 0) -> None:
        """Append tokens, the same on all ranks, to all sequences: each rank keeps its share.

        Args:
            k, v: `[sequences, n, h_kv, d]` and `[sequences, n, h_kv, d_v]`.
            layer: the layer that they are of.

        Raises:
            ValueError: they don't fit the cache, or a sequence has no room for them.
        """
        problem = self.problem(k, v, layer)
        if problem is not None:
            raise ValueError(f"RingCache: {problem}")
        self.prepare(k.shape[1], layer, self.in_graph)
        if self.device.type == "cuda" and has_triton() and self.dtype != torch.float64:
            from ring_attention_pytorch.inference._triton_append import append

            append(
                (k, v), (self.keys[layer], self.values[layer]), self.tables,
                self.layer_lengths[layer], self.rooms, self.overflown, self.pages, self.ring.rank,
            )  # fmt: skip
            self.advance(k.shape[1], layer, on_device=False, in_graph=self.in_graph)
        else:
            self.write(k, v, layer)
            self.advance(k.shape[1], layer)

    @beartype
    def rollback(self, n: int | Sequence[int]) -> None:
        """Forget the last `n` tokens of all sequences, or so many of each, in all layers.

        Raises:
            ValueError: a sequence has fewer.
        """
        each = [n] * self.sequences if isinstance(n, int) else list(n)
        lengths, least = self.lengths, [min(layers) for layers in zip(*self._lengths)]
        if len(each) != self.sequences or any(not 0 <= m <= has for m, has in zip(each, lengths)):
            raise ValueError(
                f"RingCache: rollback takes from 0 to as many tokens as there are of each of the "
                f"{self.sequences} sequences, {lengths}, got {n}"
            )
        if any(length - m > low for length, m, low in zip(lengths, each, least)):
            raise ValueError(
                f"RingCache: some layers have only {least} tokens, where the first has {lengths}: "
                "roll back at least to there"
            )
        copies: Copies = []
        for sequence, (m, length) in enumerate(zip(each, lengths)):
            if m:
                self._grow(self._table.open_pages(sequence, length - m))
                copies += self._table.shorten(sequence, length - m)
        self._apply(copies, [length - m for length, m in zip(lengths, each)])

    @beartype
    def reorder(self, beams: Sequence[int]) -> None:
        """Let sequence i go on from sequence `beams[i]`. Full pages are shared, not copied."""
        beams, lengths, starts = list(beams), self.even_lengths(), self.starts.tolist()
        if len(beams) != self.sequences or any(not 0 <= i < self.sequences for i in beams):
            raise ValueError(
                f"RingCache: reorder takes a number from 0 to {self.sequences - 1} for each of the "
                f"{self.sequences} sequences, got {beams}"
            )
        if beams == list(range(self.sequences)):
            return
        self._grow(sum(self._table.open_pages(i, lengths[i]) for i in beams))
        copies = self._table.rearrange(beams, lengths)
        self._apply(copies, [lengths[i] for i in beams], [starts[i] for i in beams])

    @beartype
    def fork(self, source: int, *targets: int) -> None:
        """Let `targets` go on from a sequence; what they were is forgotten."""
        beams = list(range(self.sequences))
        for i in (source, *targets):
            if not 0 <= i < self.sequences:
                raise ValueError(f"RingCache: there are {self.sequences} sequences, and no {i}")
        for target in targets:
            beams[target] = source
        self.reorder(beams)

    @beartype
    def free(self, sequence: int) -> None:
        """Forget a sequence, in all layers. Its memory serves others, or what comes in its place.

        With a capacity it keeps as many pages as before, so that graphs may append to it.
        """
        if not 0 <= sequence < self.sequences:
            raise ValueError(f"RingCache: there are {self.sequences} sequences, and no {sequence}")
        lengths, starts = self.even_lengths(), self.starts.tolist()
        lengths[sequence] = starts[sequence] = 0
        self._table.free(sequence)
        if self.capacity is not None:
            self._table.reserve(sequence, self.capacity)
        self._apply([], lengths, starts)

    @beartype
    def hide_before(self, starts: Sequence[int]) -> None:
        """Hide the tokens of each sequence before this one: left padding is never seen."""
        if len(starts) != self.sequences or min(starts) < 0:
            raise ValueError(
                f"RingCache: starts must be {self.sequences} numbers from 0, got {list(starts)}"
            )
        self.starts.copy_(torch.tensor(list(starts), dtype=torch.int32))
        self.has_starts = True

    @beartype
    def reserve(self, tokens: int) -> None:
        """Make room for sequences of so many tokens, so that graphs may append up to there."""
        self._reserve([tokens] * self.sequences)

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank holds: of each layer and sequence keys, values and tokens."""
        held = [
            [self.local(sequence, layer) for sequence in range(self.sequences)]
            for layer in range(self.layers)
        ]
        return {"lengths": self.even_lengths(), "starts": self.starts.tolist(), "held": held}

    @beartype
    def load_state_dict(self, *states: dict[str, Any]) -> None:
        """Take this rank's share of what all ranks of another cache held, of any number.

        Args:
            states: the `state_dict` of each rank of that cache, in any order.

        Raises:
            ValueError: they are not all of one cache like this one.
        """
        lengths = states[0]["lengths"]
        for layer in range(self.layers):
            for sequence, length in enumerate(lengths):
                parts = [state["held"][layer][sequence] for state in states]
                tokens = torch.cat([part[2] for part in parts])
                if sorted(tokens.tolist()) != list(range(length)):
                    raise ValueError(
                        f"RingCache: the states hold {len(tokens)} of the {length} tokens of "
                        f"sequence {sequence}; give those of all ranks, once each"
                    )
        self._apply([], [0] * self.sequences)
        self._reserve(lengths)
        page, ranks = self.pages.page, self.pages.ranks
        for layer, pools in enumerate(zip(self.keys, self.values)):
            for sequence in range(self.sequences):
                for state in states:
                    k, v, tokens = (t.to(self.device) for t in state["held"][layer][sequence])
                    mine = tokens // page % ranks == self.ring.rank
                    tokens = tokens[mine]
                    where = self.tables[sequence, tokens // (page * ranks)].long()
                    for pool, t in zip(pools, (k, v)):
                        pool[where, :, tokens % page] = t[mine].to(self.dtype)
        self._apply([], lengths)
        if any(states[0]["starts"]):
            self.hide_before(states[0]["starts"])

    def problem(self, k: Tensor, v: Tensor, layer: int) -> str | None:
        """Say what keeps tokens from being appended; None if nothing."""
        shape = (self.sequences, k.shape[1] if k.ndim == 4 else 0, self.key_heads)
        wanted = [(*shape, self.head_dim), (*shape, self.value_dim)]
        if [k.shape, v.shape] != wanted:
            return f"k and v must be {wanted[0]} and {wanted[1]}, got {[*k.shape]}, {[*v.shape]}"
        if {k.dtype, v.dtype} != {self.dtype} or {k.device, v.device} != {self.device}:
            return (
                f"k and v must be {self.dtype} on {self.device}, as the cache is, got {k.dtype} on "
                f"{k.device} and {v.dtype} on {v.device}"
            )
        if not 0 <= layer < self.layers:
            return f"layer must be from 0 to {self.layers - 1}, got {layer}"
        return None


def _indexed(named: torch.device | str) -> torch.device:
    device = torch.device(named)
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _problem(
    sizes: dict[str, int], capacity: int | None, page: int, dtype: torch.dtype
) -> str | None:
    for name, size in sizes.items():
        if size < 1:
            return f"{name} must be at least 1, got {size}"
    if capacity is not None and capacity < 1:
        return f"capacity must be at least 1, or None for memory that grows, got {capacity}"
    if not 1 <= page <= _LARGEST_PAGE:
        return f"page must be from 1 to {_LARGEST_PAGE}, got {page}"
    if dtype not in _DTYPES:
        return f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {dtype}"
    return None


def _memory_problem(
    sizes: Sizes, capacity: int | None, ranks: int, error: RuntimeError | MemoryError
) -> str:
    """Say what came instead of memory; for lack of it, how much was wanted."""
    text = next(iter(str(error).splitlines()), type(error).__name__)
    if not isinstance(error, MemoryError) and "memory" not in text:
        return text
    return (
        f"{capacity} tokens of {sizes.sequences} sequences and {sizes.layers} layers do not fit "
        f"the memory of {'this process' if ranks == 1 else f'{ranks} ranks'}: {text}; spread them "
        "over more ranks, or take a smaller capacity"
    )
