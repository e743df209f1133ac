"""A cache of keys and values that stays spread over the ranks of a ring.

Every rank holds its share of every sequence, in pages (`page_table`), and knows all lengths.
Appending and dropping tokens, and sharing them between sequences, takes no messages.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.arguments import checked, checks_of
from ring_attention_pytorch.inference.page_table import Copies
from ring_attention_pytorch.inference.pools import Sizes
from ring_attention_pytorch.inference.rolling import Windows
from ring_attention_pytorch.inference.states import check_states, longest_of
from ring_attention_pytorch.inference.storage import PagedStorage
from ring_attention_pytorch.ranks.agreement import agree, error_of, report_to_group, typed
from ring_attention_pytorch.ranks.ring import Group, as_ring
from ring_attention_pytorch.runtime.rowwise import has_triton
from ring_attention_pytorch.runtime.scaled import SCALED, WIDE, as_integers, restored, stored
from ring_attention_pytorch.runtime.torch_func import resolved

_DTYPES = (*WIDE, *SCALED)
_LARGEST_PAGE = 256


class RingCache(PagedStorage):
    """Keys and values of some sequences and layers; each rank of a ring holds its share of them.

    Lengths, positions and owners count tokens of the whole sequence. All ranks make the same calls
    in the same order; none of the methods sends anything.

    Args:
        sequences: the number of sequences; each has its own length.
        key_heads, head_dim: of keys; values have `value_dim`, by default head_dim too.
        layers: the number of layers to cache. They share pages.
        capacity: the most tokens of a sequence. All memory is allocated at once, and CUDA graphs
            can append. None: memory grows by pages.
        page: consecutive tokens on one rank before the next rank's turn, 1 to 256.
        dtype, device: of keys and values. `torch.float8_e4m3fn` takes half the memory of 16 bits:
            each key and value of a head is scaled by a power of two and rounded when it is
            appended, and attention uses the rounded values. Queries and new keys and values can
            then have any other dtype.
        windows: for each layer the most tokens before its own that a query sees, None for all.
            Every rank holds all of the last `window + 2 * spare` tokens of a layer with a window,
            and no others.
        spare: the most tokens that layers with a window can roll back, or append in one step.
        tied: values are the first `value_dim` numbers of keys, are held once, and are never given
            (v is None); not in 8 bits.
        group: the ring; None is the default group, or this process alone.

    Attributes:
        lengths_of: int32 `[layers, sequences]` on the device; CUDA graphs read and advance them.
        starts: int32 `[sequences]`: tokens before this one are never seen (left padding).
        tables: int32 `[sequences, pages]`: the place of each page in `keys` and `values`.
        keys, values: a pool for each layer, `[pages, key_heads, page, head_dim]`.
        key_scales, value_scales: their factors, `[pages, key_heads, page, 1]` in float32;
            `[pages, key_heads, page, 0]` unless the dtype has 8 bits.

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

    @typed(report_to_group("RingCache"))
    def __init__(
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
        windows: Sequence[int | None] | None = None,
        spare: int = 64,
        tied: bool = False,
        group: Group = None,
    ) -> None:
        ring = as_ring(group)
        sizes = Sizes(
            sequences, key_heads, head_dim, head_dim if value_dim is None else value_dim, layers
        )
        of_layers = Windows((None,) * layers if windows is None else tuple(windows), spare)
        same = {**sizes._asdict(), "capacity": capacity, "page": page, "dtype": dtype}
        same |= {"windows": list(of_layers.of), "spare": spare, "tied": tied}

        def check() -> None:
            _check_sizes(sizes._asdict(), capacity, page, dtype)
            of_layers.check(layers)
            if tied:
                _check_tied(sizes, dtype)
            try:
                storage(ring, sizes, capacity, page, dtype, _indexed(device), of_layers, tied)
            except (RuntimeError, MemoryError) as error:
                raise ValueError(_without_memory(sizes, capacity, ring.size, error)) from error

        storage = super().__init__
        agree(ring, "RingCache", same, check=check)

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each sequence, over all ranks."""
        return list(self.lengths_in(0))

    @property
    def local_lengths(self) -> list[int]:
        """The number of tokens of each sequence that this rank holds."""
        return [self.pages.held(self.ring.rank, length) for length in self.lengths]

    @property
    def nbytes(self) -> int:
        """The bytes of keys and values on this rank, with their scales."""
        return sum(pool.nbytes for pool in chain(*self.pools.all))

    @property
    def takes(self) -> str:
        """The dtypes and the device of queries and new keys, as text for errors."""
        return f"{' or '.join(map(str, self.dtypes))} on {self.device}"

    def taken_as(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype to pass tensors of `dtype` in: `dtype` itself, or the cache's."""
        return dtype if dtype in self.dtypes else self.dtype

    @checked
    def owner(self, token: int) -> int:
        """Return the rank that holds a token, the same for all sequences.

        Raises:
            ValueError: it is negative, or beyond the capacity.
        """
        self._check_capacity("owner takes a token", token + 1, least=1)
        return self.pages.owner(token)

    @checked
    def append(self, k: Tensor, v: Tensor | None, layer: int = 0) -> None:
        """Append tokens to all sequences. All ranks pass the same ones, and each stores its share.

        Args:
            k, v: `[sequences, n, h_kv, d]` and `[sequences, n, h_kv, d_v]`; v is None if the cache
                is tied.
            layer: the layer of k and v.

        Raises:
            ValueError: they don't fit the cache, or a sequence has no room for them.
        """
        with checks_of("RingCache"):
            k, values = resolved(k), resolved(values_of(self, k, v))
            self.check_new(k, values, layer)
        self.prepare(k.shape[1], layer, self.in_graph)
        step = self.memory(layer).at_once or max(1, k.shape[1])
        for some_k, some_v in zip(k.split(step, dim=1), values.split(step, dim=1)):
            self._append(some_k, some_v, layer)

    def _append(self, k: Tensor, v: Tensor, layer: int) -> None:
        """Append tokens that fit, few enough not to overwrite one another."""
        pools = self.memory(layer)
        if self.device.type == "cuda" and has_triton() and k.dtype != torch.float64:
            from ring_attention_pytorch.inference._triton_append import append

            append((k, v), pools, layer)
            if not self.in_graph:
                self.advance(k.shape[1], layer, on_device=False)
        else:
            pools.write(k, v, layer, self.lengths_in(layer))
            self.advance(k.shape[1], layer)

    @checked
    def rounded(self, t: Tensor) -> Tensor:
        """Round keys or values `[..., d]` as this cache does, and return them in their dtype."""
        return restored(*stored(t, self.dtype)).to(t.dtype)

    @checked
    def rollback(self, n: int | Sequence[int]) -> None:
        """Drop the last `n` tokens of all sequences, or `n[i]` of each, in all layers.

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
        left = [length - m for length, m in zip(lengths, each)]
        for circle in self.circles:
            circle.look(self._lengths)
            circle.check_rollback(left)
        self._grow(self._table.taken_to_shorten(left))
        copies: Copies = []
        for sequence, (m, length) in enumerate(zip(each, left)):
            if m:
                copies += self._table.shorten(sequence, length)
        self._apply(copies, left)

    @checked
    def reorder(self, beams: Sequence[int]) -> None:
        """Make sequence i continue sequence `beams[i]`. Full pages are shared, not copied."""
        beams, lengths, starts = list(beams), self.even_lengths(), self.starts.tolist()
        if len(beams) != self.sequences or any(not 0 <= i < self.sequences for i in beams):
            raise ValueError(
                f"RingCache: reorder takes a number from 0 to {self.sequences - 1} for each of the "
                f"{self.sequences} sequences, got {beams}"
            )
        if beams == list(range(self.sequences)):
            return
        self._grow(self._table.taken_to_rearrange(beams, lengths))
        copies = self._table.rearrange(beams, lengths)
        self.lineage.reorder(beams)
        for circle in self.circles:
            circle.look(self._lengths)
            circle.reorder(beams)
        self._apply(copies, [lengths[i] for i in beams], [starts[i] for i in beams])

    @checked
    def fork(self, source: int, *targets: int) -> None:
        """Make `targets` continue sequence `source`; their own tokens are dropped."""
        beams = list(range(self.sequences))
        for i in (source, *targets):
            if not 0 <= i < self.sequences:
                raise ValueError(f"RingCache: there are {self.sequences} sequences, and no {i}")
        for target in targets:
            beams[target] = source
        self.reorder(beams)

    @checked
    def free(self, sequence: int) -> None:
        """Drop a sequence's tokens in all layers. Other sequences can reuse its pages.

        With a capacity the sequence keeps as many pages as before, so that graphs can append.
        """
        if not 0 <= sequence < self.sequences:
            raise ValueError(f"RingCache: there are {self.sequences} sequences, and no {sequence}")
        lengths, starts = self.even_lengths(), self.starts.tolist()
        lengths[sequence] = starts[sequence] = 0
        self._table.free(sequence)
        if self.capacity is not None:
            self._table.reserve(sequence, self.capacity)
        self._apply([], lengths, starts)

    @checked
    def hide_before(self, starts: Sequence[int]) -> None:
        """Hide the tokens of sequence i before token `starts[i]`, its left padding."""
        if len(starts) != self.sequences or any(not 0 <= start < 1 << 30 for start in starts):
            raise ValueError(
                f"RingCache: starts must be {self.sequences} numbers from 0, below 2 ** 30, "
                f"got {list(starts)}"
            )
        self._pad(starts)
        self.has_starts = True

    @checked
    def reserve(self, tokens: int) -> None:
        """Allocate pages for `tokens` tokens of each sequence, so that graphs can append them.

        Raises:
            ValueError: it is negative, or beyond the capacity.
        """
        self._check_capacity("reserve takes a number of tokens", tokens)
        self._reserve([tokens] * self.sequences)

    def _check_capacity(self, what: str, tokens: int, least: int = 0) -> None:
        """Raise ValueError if no sequence can have `tokens` tokens."""
        most = self.capacity
        if tokens < least or (most is not None and tokens > most):
            to = "" if most is None else f" to {most - least}"
            raise ValueError(f"RingCache: {what} from 0{to}, got {tokens - least}")

    @checked
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's keys, values, tokens and scales, for each layer and sequence.

        Layers with a window include all tokens that a rollback can reach, and each sequence's
        longest length.
        """
        lengths = self.even_lengths()
        for circle in self.circles:
            circle.look(self._lengths)
        held: list[list[tuple[Tensor, ...]]] = []
        for layer in range(self.layers):
            held.append([])
            window = self._rolling.get(layer)
            for sequence, length in enumerate(lengths):
                first = 0 if window is None else window.dropped[sequence]
                kept, tokens = self.memory(layer).held(sequence, layer, length, first)
                mine = tokens // self.pages.page % self.pages.ranks == self.ring.rank
                k, v, *scales = (t[mine] for t in kept)
                held[-1].append((as_integers(k), as_integers(v), tokens[mine], *scales))
        starts, longest = self.starts.tolist(), [self._longest(i) for i in range(self.layers)]
        return {"lengths": lengths, "starts": starts, "held": held, "longest": longest}

    def _longest(self, layer: int) -> list[int]:
        """Return each sequence's longest length so far; its length in a layer without a window."""
        circle = self._rolling.get(layer)
        return [*(self.lengths_in(layer) if circle is None else circle.longest)]

    @checked
    def load_state_dict(self, *states: dict[str, Any]) -> None:
        """Load this rank's share of another cache, which can have had any number of ranks.

        Args:
            states: the `state_dict` of each rank of that cache, in any order.

        Raises:
            ValueError: the states are not all of one cache, or its layers, sequences, heads, head
                sizes, dtype or scales differ from this one's, or it has more tokens than fit. This
                cache is unchanged then. Pages, capacity, windows and ranks can differ.
        """
        if (error := error_of(partial(check_states, self, states))) is not None:
            raise ValueError(f"RingCache: {error}")
        lengths, starts = states[0]["lengths"], states[0]["starts"]
        self._begin_anew(lengths)
        oldest = [self._take(states, layer) for layer in range(self.layers)]
        self._apply([], lengths, starts)
        self.has_starts = self.has_starts or any(starts)
        for circle in self.circles:
            of_layers = [longest_of(states, layer) for layer in circle.layers]
            dropped = [oldest[layer] for layer in circle.layers]
            circle.take([*map(max, *of_layers, lengths)], [max(each) for each in zip(*dropped)])

    def _take(self, states: Sequence[dict[str, Any]], layer: int) -> list[int]:
        """Write a layer's tokens of all states; return the first stored token of each sequence."""
        circle, pools, oldest = self._rolling.get(layer), self.memory(layer), []
        longest = longest_of(states, layer)
        for sequence, length in enumerate(states[0]["lengths"]):
            first = length - sum(len(state["held"][layer][sequence][2]) for state in states)
            if circle is not None:
                first = max(first, longest[sequence] - circle.turns * pools.pages.page)
            oldest.append(first)
            for state in states:
                held = (t.to(self.device) for t in state["held"][layer][sequence])
                k, v, tokens, key_scales, value_scales = held
                new = tokens >= first
                k, v = restored(k, key_scales), restored(v, value_scales)
                pools.put(sequence, layer, tokens[new], k[new], v[new])
        return oldest

    def check_new(self, k: Tensor, v: Tensor, layer: int) -> None:
        """Raise ValueError if k and v can't be appended to a layer."""
        shape = (self.sequences, k.shape[1] if k.ndim == 4 else 0, self.key_heads)
        wanted = [(*shape, self.head_dim), (*shape, self.value_dim)]
        if [k.shape, v.shape] != wanted:
            raise ValueError(
                f"k and v must be {wanted[0]} and {wanted[1]}, got {[*k.shape]}, {[*v.shape]}"
            )
        same = k.dtype == v.dtype in self.dtypes
        if not same or {k.device, v.device} != {self.device}:
            raise ValueError(
                f"k and v must be {self.takes}, as the cache is, got {k.dtype} on {k.device} and "
                f"{v.dtype} on {v.device}"
            )
        self.check_layer(layer)
        at_once = self.memory(layer).at_once or k.shape[1]
        if k.shape[1] > at_once and self.in_graph:
            raise ValueError(
                f"a CUDA graph appends at most `spare` tokens to this layer, {at_once}"
            )

    def check_layer(self, layer: int) -> None:
        """Raise ValueError if there is no such layer."""
        if not 0 <= layer < self.layers:
            raise ValueError(f"layer must be from 0 to {self.layers - 1}, got {layer}")


def values_of(cache: RingCache, k: Tensor | None, v: Tensor | None) -> Any:
    """Return the values that come with keys k; in a tied cache they are a part of k.

    Raises:
        ValueError: the cache is tied and v is given, or it is not and v is missing.
    """
    if cache.tied and v is not None:
        raise ValueError("this cache is tied, its values are the first of keys: give no v")
    if cache.tied and k is not None and k.ndim:
        return k[..., : cache.value_dim]
    if k is not None and v is None:
        raise ValueError("v must be given with k, unless the cache is tied")
    return v


def _indexed(named: torch.device | str) -> torch.device:
    device = torch.device(named)
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _check_tied(sizes: Sizes, dtype: torch.dtype) -> None:
    if sizes.value_dim > sizes.head_dim:
        raise ValueError(
            f"tied values are the first numbers of keys: value_dim must be at most "
            f"{sizes.head_dim}, got {sizes.value_dim}"
        )
    if dtype in SCALED:
        raise ValueError(
            f"a tied cache can't be of {dtype}: keys and values have scales of their own; take 16 "
            "bits, or leave tied out"
        )


def _check_sizes(
    sizes: dict[str, int], capacity: int | None, page: int, dtype: torch.dtype
) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if capacity is not None and capacity < 1:
        raise ValueError(
            f"capacity must be at least 1, or None for memory that grows, got {capacity}"
        )
    if not 1 <= page <= _LARGEST_PAGE:
        raise ValueError(f"page must be from 1 to {_LARGEST_PAGE}, got {page}")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {dtype}")


def _without_memory(
    sizes: Sizes, capacity: int | None, ranks: int, error: RuntimeError | MemoryError
) -> str:
    """Return the error's first line; if memory ran out, also the size that was asked for."""
    text = next(iter(str(error).splitlines()), type(error).__name__)
    if not isinstance(error, MemoryError) and "memory" not in text:
        return text
    return (
        f"{capacity} tokens of {sizes.sequences} sequences and {sizes.layers} layers do not fit "
        f"the memory of {'this process' if ranks == 1 else f'{ranks} ranks'}: {text}; spread them "
        "over more ranks, or take a smaller capacity"
    )
