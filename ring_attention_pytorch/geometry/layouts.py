"""Layouts: which rank holds which token, as arithmetic on ints.

A layout gives every rank its *segments* (arithmetic progressions of global token positions), in
the order in which they lie in memory. Sharding, rotary angles, labels and masks (`tiles`) all
follow from positions.

Eight tokens over two ranks; `A` and `B` hold them:

    contiguous  AAAABBBB      striped  ABABABAB      zigzag  AABBBBAA

A new layout is one function here and one line in `LAYOUTS` (docs/design/adding-a-layout.md).
"""

from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple

from torch import Tensor

from ring_attention_pytorch.arguments import checked
from ring_attention_pytorch.geometry.segments import (
    Segment,
    Segments,
    count,
    segment_positions,
)


class AssignedLayout(NamedTuple):
    """A layout for one sequence and one ring: every rank's segments."""

    segments: tuple[Segments, ...]

    def __repr__(self) -> str:
        tokens = sum(map(count, self.segments))
        digest = sha256(str([*self]).encode()).hexdigest()
        return f"balanced of {tokens} tokens over {len(self.segments)} ranks, {digest[:12]}"


Layout = str | AssignedLayout


def contiguous(rank: int, ring_size: int, length: int) -> Segments:
    """Give each rank one chunk, in order: simple, but causal work grows with the rank."""
    return _chunks([rank], ring_size, length)


def striped(rank: int, ring_size: int, length: int) -> Segments:
    """Give token i to rank i mod P (Brandon et al. 2023, "Striped Attention")."""
    tokens = len(range(rank, length, ring_size))
    return (Segment(rank, ring_size, tokens),)


def zigzag(rank: int, ring_size: int, length: int) -> Segments:
    """Give each rank one of the first P of 2P chunks and its mirror image: equal causal work."""
    return _chunks([rank, 2 * ring_size - 1 - rank], 2 * ring_size, length)


# by name; segments may be empty
LAYOUTS: dict[str, Callable[[int, int, int], Segments]] = {
    "contiguous": contiguous,
    "striped": striped,
    "zigzag": zigzag,
}


def _chunks(chosen: list[int], chunks: int, length: int) -> Segments:
    """Return the chosen chunks as segments; chunks are cut as by `torch.tensor_split`."""
    size, longer = divmod(length, chunks)
    segments = []
    for chunk in chosen:
        start = chunk * size + min(chunk, longer)
        segments.append(Segment(start, 1, size + (chunk < longer)))
    return tuple(segments)


def all_segments(layout: Layout, ring_size: int, length: int) -> tuple[Segments, ...]:
    """Return the segments of every rank.

    Raises:
        ValueError: an unknown layout, or one that was made for another length or ring size.
    """
    check_layout(layout, ring_size, length)
    if isinstance(layout, AssignedLayout):
        return layout.segments
    return _segments_by_name(layout, ring_size, length)


@lru_cache(maxsize=1024)
def _segments_by_name(layout: str, ring_size: int, length: int) -> tuple[Segments, ...]:
    by_rank = []
    for rank in range(ring_size):
        segments = LAYOUTS[layout](rank, ring_size, length)
        by_rank.append(tuple(s for s in segments if s.length > 0))
    return tuple(by_rank)


@checked
def positions(layout: Layout, *, rank: int, ring_size: int, length: int) -> Tensor:
    """Return the global positions of a rank's tokens, in the order in which it holds them.

    Args:
        layout: "contiguous", "striped", "zigzag" or a layout that `balanced` made.
        rank: the place in the ring, 0 to `ring_size` - 1.
        ring_size: how many ranks share the sequence, at least 1.
        length: tokens of the whole sequence, at least 0; `ring_size` need not divide it.

    Returns:
        int64 `[n]`, n being the number of tokens that this rank holds.

    Raises:
        ValueError: an unknown layout, or numbers outside of these ranges or not the layout's own.

    >>> positions("striped", rank=0, ring_size=4, length=12).tolist()
    [0, 4, 8]
    >>> positions("zigzag", rank=0, ring_size=2, length=10).tolist()  # chunks 3, 3, 2, 2
    [0, 1, 2, 8, 9]
    """
    check_layout(layout)
    if ring_size < 1 or not 0 <= rank < ring_size or length < 0:
        raise ValueError(
            "positions needs 0 <= rank < ring_size and length >= 0, "
            f"got rank={rank}, ring_size={ring_size}, length={length}"
        )
    return segment_positions(all_segments(layout, ring_size, length)[rank])


def check_layout(layout: Layout, ring_size: int | None = None, length: int | None = None) -> None:
    """Raise ValueError for an unknown layout, or one for another ring size or length (if given)."""
    if isinstance(layout, AssignedLayout):
        ranks = len(layout.segments)
        tokens = sum(map(count, layout.segments))
        if ring_size not in (None, ranks) or length not in (None, tokens):
            raise ValueError(
                f"the layout was dealt for {tokens} tokens over {ranks} ranks, got {length} over "
                f"{ring_size}; make it with balanced(cu_seqlens, ring_size) for these"
            )
    elif layout not in LAYOUTS:
        names = ", ".join(map(repr, LAYOUTS))
        raise ValueError(f"layout must be one of {names}, or made by balanced(), got {layout!r}")


def resolve_layout(layout: Layout | None, striped: bool) -> Layout | None:
    """Return the layout that `layout=` or the older flag `striped` names.

    Raises:
        ValueError: an unknown layout, or one that contradicts `striped`.
    """
    if layout is not None:
        check_layout(layout)
    if striped and layout not in (None, "striped"):
        raise ValueError(f"striped_ring_attn=True is layout='striped', got layout={layout!r} too")
    return "striped" if striped else layout
